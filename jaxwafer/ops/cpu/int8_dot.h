// Products of rows of x quantised to int8 in blocks of 32 with integer weights: whole numbers within a block, float32
// beyond it. The few-rows and many-rows forms are those of float_dot.h.

#pragma once

#include "float_dot.h"

namespace {

constexpr int64_t kQuadRows = 4, kQuadVectors = 2;           // register tile of the many-rows form
constexpr int64_t kQuadBlocks = 16, kQuadOutputs = 64;  // tile of written-out weights: 32 KiB

#if JAXWAFER_LANES == 16
typedef __m512i Raw;
inline Raw Ones16() { return _mm512_set1_epi16(1); }
inline Raw And(Raw a, int8_t b) { return _mm512_and_si512(a, _mm512_set1_epi8(b)); }
inline Raw HighNibbles(Raw a) { return And(_mm512_srli_epi16(a, 4), 15); }
inline Raw Splat32(int32_t a) { return _mm512_set1_epi32(a); }
inline Raw LookUp(const int8_t* table, Raw index) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(Load<__m128i>(table)), index);
}
#if defined(__AVX512VNNI__)
inline Ints DotAdd(Ints sum, Raw u, Raw s) { return (Ints)_mm512_dpbusd_epi32((Raw)sum, u, s); }
#else
// Pairs of products must fit 16 bits, so the highest bit of u goes by itself.
inline Ints DotAdd(Ints sum, Raw u, Raw s) {
  Raw low = _mm512_madd_epi16(_mm512_maddubs_epi16(And(u, 127), s), Ones16());
  Raw high = _mm512_madd_epi16(_mm512_maddubs_epi16(And(u, -128), s), Ones16());
  return sum + (Ints)low + (Ints)high;
}
#endif
inline Floats Spread(Floats v, Ints index) { return (Floats)_mm512_permutexvar_ps((Raw)index, (__m512)v); }
#elif JAXWAFER_LANES == 8
typedef __m256i Raw;
inline Raw And(Raw a, int8_t b) { return _mm256_and_si256(a, _mm256_set1_epi8(b)); }
inline Raw HighNibbles(Raw a) { return And(_mm256_srli_epi16(a, 4), 15); }
inline Raw Splat32(int32_t a) { return _mm256_set1_epi32(a); }
inline Raw LookUp(const int8_t* table, Raw index) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(Load<__m128i>(table)), index);
}
// Pairs of products must fit 16 bits: u up to 128 with |s| ≤ 127.
inline Ints DotAdd(Ints sum, Raw u, Raw s) {
  return sum + (Ints)_mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1));
}
inline Floats Spread(Floats v, Ints index) { return (Floats)_mm256_permutevar8x32_ps((__m256)v, (Raw)index); }
#else
typedef uint8_t Raw __attribute__((vector_size(16)));
inline Raw And(Raw a, int8_t b) { return a & uint8_t(b); }
inline Raw HighNibbles(Raw a) { return a >> 4; }
inline Raw Splat32(int32_t a) { return (Raw)(Ints{} + a); }
inline Raw LookUp(const int8_t* table, Raw index) {
  for (int i = 0; i < 16; ++i) index[i] = uint8_t(table[index[i]]);
  return index;
}
inline Ints DotAdd(Ints sum, Raw u, Raw s) {
  for (int i = 0; i < 16; ++i) sum[i / 4] += int(u[i]) * int8_t(s[i]);
  return sum;
}
inline Floats Spread(Floats v, Ints index) {
  Floats out;
  for (int i = 0; i < kLanes; ++i) out[i] = v[index[i]];
  return out;
}
#endif

// The first `left` bytes of a vector, and zeros.
inline Raw ReadUpTo(const uint8_t* p, int64_t left) {
  if (left >= int64_t(sizeof(Raw))) return Load<Raw>(p);
  Raw raw{};
  std::memcpy(&raw, p, left);
  return raw;
}

// Unsigned numbers below 32, two to a byte: 4 lanes of sums a block. kOffset is added in Unsigned, besides the format's
// own offset; kUnit: of the number. kFlush: quads of products whose sums fit 16 bits.
struct QuantInt4 {
  static constexpr int kBytes = 16, kLanesABlock = 4, kFlush = 8;
  static constexpr float kOffset = 0, kUnit = 1;
  static constexpr Order kOrder = Order::kPaired;
  static Raw Unsigned(Raw nibbles) { return nibbles; }
  static uint8_t Unsigned(uint8_t nibble) { return nibble; }
#if JAXWAFER_LANES >= 8
  static __m128i Small(__m128i nibbles) { return nibbles; }
#endif
};

// e2m1 as twice its value plus 12.
struct QuantE2m1 : QuantInt4 {
  alignas(16) static constexpr int8_t kTable[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
  static constexpr int kFlush = 4;
  static constexpr float kOffset = 12, kUnit = 0.5f;
  static Raw Unsigned(Raw nibbles) { return LookUp(kTable, nibbles); }
  static uint8_t Unsigned(uint8_t nibble) { return uint8_t(kTable[nibble]); }
#if JAXWAFER_LANES >= 8
  static __m128i Small(__m128i nibbles) { return _mm_shuffle_epi8(Load<__m128i>(kTable), nibbles); }
#endif
};

// Bytes with a sign: unsigned with an offset of 128 for instructions that multiply unsigned by signed without
// saturating; on AVX2 they do, and the sign goes to the other factor.
struct QuantInt8 {
  static constexpr int kBytes = 32, kLanesABlock = kLanes == 4 ? 4 : 8, kFlush = 1;
  static constexpr float kOffset = kLanes == 8 ? 0 : 128, kUnit = 1;
  static constexpr Order kOrder = Order::kNatural;
};

// The dot products of a span of blocks, kLanesABlock lanes each.
template <class Q>
struct Span {
  static constexpr bool kNibbles = Q::kBytes == 16;
  static constexpr int kBlocks = kLanes / Q::kLanesABlock, kParts = kNibbles ? 2 : kBlocks * kBlock / int(sizeof(Raw));
  Raw part[kParts];

  Span(const uint8_t* p, int64_t left) {
    if constexpr (kNibbles) {
      Raw raw = ReadUpTo(p, left);
      part[0] = Q::Unsigned(And(raw, 15)), part[1] = Q::Unsigned(HighNibbles(raw));
    } else {
      for (int i = 0; i < kParts; ++i) {
        int64_t rest = left - i * int64_t(sizeof(Raw));
        part[i] = rest > 0 ? ReadUpTo(p + i * sizeof(Raw), rest) : Raw{};
#if JAXWAFER_LANES != 8
        part[i] = (Raw)((Words)part[i] ^ 0x80808080u);
#endif
      }
    }
  }

  Ints Dot(const int8_t* x) const {
    Ints sum{};
#if JAXWAFER_LANES == 8
    if constexpr (kNibbles) {
      Raw pairs = _mm256_add_epi16(_mm256_maddubs_epi16(part[0], Load<Raw>(x)),
                                   _mm256_maddubs_epi16(part[1], Load<Raw>(x + sizeof(Raw))));
      return (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    } else {
      return DotAdd(sum, _mm256_abs_epi8(part[0]), _mm256_sign_epi8(Load<Raw>(x), part[0]));
    }
#endif
    for (int i = 0; i < kParts; ++i) sum = DotAdd(sum, part[i], Load<Raw>(x + i * sizeof(Raw)));
    return sum;
  }
};

// Adds blocks [b, b + count) of C outputs from n, R rows of x from m, to `sums` [outputs from n][rows of x]. scale and
// shift: of the outputs, `pitch` apart.
template <class Q, bool kShift, int R, int C>
inline void QuantDot(const Matrix& w, const Activations& x, int64_t n, int64_t m, int64_t b, int64_t count,
                     const float* scale, const float* shift, int64_t pitch, Floats* sums) {
  using S = Span<Q>;
  const uint8_t* row = w.values + n * w.row_bytes;
  const int8_t* from = x.quantised + m * x.stride;
  Ints index{};
  for (int i = 0; i < kLanes; ++i) index[i] = i / Q::kLanesABlock;
  Floats sum[C][R];
  for (int c = 0; c < C; ++c)
    for (int r = 0; r < R; ++r) {
      sum[c][r] = sums[c * x.rows + m + r];
      if constexpr (kShift)
        sum[c][r] += DotShifts(shift + c * pitch, x.sums + (m + r) * x.block_stride + b, count);
    }
  for (int64_t j = 0; j < count; j += kLanes) {
    Floats product[C][R];
    for (int r = 0; r < R; ++r) {
      Floats own = Load<Floats>(x.scale + (m + r) * x.block_stride + b + j);
      // Behind the last block x's scales are zeros, but those of the weights may be anything, such as not a number.
      for (int c = 0; c < C; ++c) product[c][r] = own * UpTo(Load<Floats>(scale + c * pitch + j), count - j);
    }
    auto add = [&](int step, bool whole) {
      int64_t block = b + j + step * S::kBlocks, at = block * Q::kBytes;
      for (int c = 0; c < C; ++c) {
        if (R == 1) __builtin_prefetch(row + at + kAhead);
        S span(row + c * w.row_bytes + at, whole ? int64_t(sizeof(Raw)) * S::kParts : w.row_bytes - at);
        for (int r = 0; r < R; ++r)
          sum[c][r] += __builtin_convertvector(span.Dot(from + r * x.stride + block * kBlock), Floats) *
                       Spread(product[c][r], index + step * S::kBlocks);
      }
    };
    if ((b + j + kLanes) * Q::kBytes <= w.row_bytes && count - j >= kLanes) {
#pragma GCC unroll 16
      for (int step = 0; step < Q::kLanesABlock; ++step) add(step, true);
    } else {
      for (int step = 0; step * S::kBlocks < std::min<int64_t>(kLanes, count - j); ++step) add(step, false);
    }
  }
  for (int c = 0; c < C; ++c)
    for (int r = 0; r < R; ++r) sums[c * x.rows + m + r] = sum[c][r];
}

// As DotChunk of float_dot.h.
template <class Q, bool kShift>
void QuantDotChunk(const Matrix& w, const Activations& x, float* const* out, int64_t begin, int64_t end) {
  Floats sums[kDotOutputs * kDotLimit];
  TileScales<kDotOutputs, kDotBlocks> scales;
  for (int64_t tile = TileOutputs(w, x); begin < end; begin += tile) {
    int64_t outputs = std::min(tile, end - begin);
    std::fill_n(sums, outputs * x.rows, Floats{});
    for (int64_t b = 0; b < w.blocks; b += kDotBlocks) {
      int64_t count = std::min(kDotBlocks, w.blocks - b);
      scales.template Read<kShift>(w, begin, outputs, b, count, Q::kUnit, Q::kOffset);
      for (int64_t m = 0; m < x.rows; m += kDotRows)
        Unrolled<kDotRows>(x.rows - m, [&](auto rows) {
          constexpr int kBeside = rows.value == 1 ? 1 : 2;
          auto dot = [&](int64_t n, auto beside) {
            QuantDot<Q, kShift, rows.value, beside.value>(w, x, begin + n, m, b, count,
                                                          scales.scale + n * scales.pitch,
                                                          scales.shift + n * scales.pitch, scales.pitch,
                                                          sums + n * x.rows);
          };
          int64_t n = 0;
          for (; n + kBeside <= outputs; n += kBeside) dot(n, std::integral_constant<int, kBeside>{});
          for (; n < outputs; ++n) dot(n, std::integral_constant<int, 1>{});
        });
    }
    for (int64_t n = 0; n < outputs; ++n)
      for (int64_t m = 0; m < x.rows; ++m) out[m][begin + n] = Sum(sums[n * x.rows + m]);
  }
}

// The 32 numbers of a block of nibbles in their own order, a byte each.
template <class Q>
inline void UnpackBytes(const uint8_t* p, uint8_t* out) {
#if JAXWAFER_LANES >= 8
  __m128i packed = Load<__m128i>(p), mask = _mm_set1_epi8(15);
  __m128i low = _mm_and_si128(packed, mask), high = _mm_and_si128(_mm_srli_epi16(packed, 4), mask);
  Store(out, Q::Small(_mm_unpacklo_epi8(low, high)));
  Store(out + 16, Q::Small(_mm_unpackhi_epi8(low, high)));
#else
  for (int i = 0; i < 16; ++i)
    out[2 * i] = Q::Unsigned(uint8_t(p[i] & 15)), out[2 * i + 1] = Q::Unsigned(uint8_t(p[i] >> 4));
#endif
}

// out[quad][lane] = the quad of 4 bytes of each lane's row, for the 8 quads of a block.
inline void TransposeQuads(const uint8_t (*rows)[kQuadBlocks * kBlock], int64_t at, uint8_t* out) {
#if JAXWAFER_LANES == 8
  __m256 r[8], pair[8];
  for (int i = 0; i < 8; ++i) r[i] = Load<__m256>(rows[i] + at);
  for (int i = 0; i < 8; i += 2) {
    pair[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    pair[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int half = 0; half < 2; ++half) {
    __m256* from = pair + 4 * half;
    r[4 * half] = _mm256_shuffle_ps(from[0], from[2], 0x44);
    r[4 * half + 1] = _mm256_shuffle_ps(from[0], from[2], 0xee);
    r[4 * half + 2] = _mm256_shuffle_ps(from[1], from[3], 0x44);
    r[4 * half + 3] = _mm256_shuffle_ps(from[1], from[3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    Store(out + i * 32, _mm256_permute2f128_ps(r[i], r[4 + i], 0x20));
    Store(out + (4 + i) * 32, _mm256_permute2f128_ps(r[i], r[4 + i], 0x31));
  }
#else
  for (int lane = 0; lane < kLanes; ++lane)
    for (int q = 0; q < kBlock / 4; ++q) std::memcpy(out + (q * kLanes + lane) * 4, rows[lane] + at + q * 4, 4);
#endif
}

// Blocks [b, b + count) of kLanes outputs from n, four inputs of each output beside one another: [quads, kLanes, 4]
// bytes, and [blocks, kLanes] scales and shifts. Outputs from `end` on are zeros.
template <class Q, bool kShift>
void WriteQuads(const Matrix& w, int64_t n, int64_t end, int64_t b, int64_t count, uint8_t* quads, float* scales,
                float* shifts) {
  alignas(64) uint8_t rows[kLanes][kQuadBlocks * kBlock];
  for (int lane = 0; lane < kLanes; ++lane) {
    TileScales<1, kQuadBlocks> own{};
    uint8_t* bytes = rows[lane];
    std::memset(bytes, 0, kQuadBlocks * kBlock);
    if (n + lane < end) {
      own.template Read<kShift>(w, n + lane, 1, b, count, Q::kUnit, Q::kOffset);
      const uint8_t* row = w.values + (n + lane) * w.row_bytes + b * Q::kBytes;
      int64_t stored = std::min(count * Q::kBytes, w.row_bytes - b * Q::kBytes);
      if constexpr (Q::kBytes == 16) {
        for (int64_t i = 0; i < stored; i += 16) UnpackBytes<Q>(row + i, bytes + 2 * i);
      } else {
        for (int64_t i = 0; i < stored; ++i) bytes[i] = row[i] ^ (Q::kOffset == 128 ? 0x80 : 0);
      }
    }
    for (int64_t i = 0; i < count; ++i) scales[i * kLanes + lane] = own.scale[i], shifts[i * kLanes + lane] = own.shift[i];
  }
  for (int64_t i = 0; i < count; ++i) TransposeQuads(rows, i * kBlock, quads + i * kBlock * kLanes);
}

// R rows of x times kQuadVectors · kLanes outputs, `count` blocks of both; added to out where `add`.
template <class Q, bool kShift, int R>
inline void QuadTile(const Activations& x, int64_t m, int64_t b, int64_t count, const uint8_t* const* quads,
                     const float* const* scales, const float* const* shifts, bool add, float* const* out, int64_t n,
                     int64_t outputs) {
  const int8_t* from = x.quantised + m * x.stride + b * kBlock;
  Floats sum[R][kQuadVectors] = {};
  for (int64_t i = 0; i < count; ++i) {
    Ints total[R][kQuadVectors] = {};
    for (int first = 0; first < kBlock / 4; first += Q::kFlush) {
#if JAXWAFER_LANES == 8
      Raw pairs[R][kQuadVectors] = {};
#endif
#pragma GCC unroll 2
      for (int q = first; q < first + Q::kFlush; ++q) {
        Raw weight[kQuadVectors];
        for (int c = 0; c < kQuadVectors; ++c)
          weight[c] = Load<Raw>(quads[c] + (i * kBlock / 4 + q) * int64_t(sizeof(Raw)));
        for (int r = 0; r < R; ++r) {
          Raw value = Splat32(Load<int32_t>(from + r * x.stride + i * kBlock + q * 4));
          for (int c = 0; c < kQuadVectors; ++c) {
#if JAXWAFER_LANES == 8
            if constexpr (Q::kBytes == 16)
              pairs[r][c] = Keep(_mm256_add_epi16(pairs[r][c], _mm256_maddubs_epi16(weight[c], value)));
            else
              total[r][c] = DotAdd(total[r][c], _mm256_abs_epi8(weight[c]), _mm256_sign_epi8(value, weight[c]));
#else
            total[r][c] = DotAdd(total[r][c], weight[c], value);
#endif
          }
        }
      }
#if JAXWAFER_LANES == 8
      if constexpr (Q::kBytes == 16)
        for (int r = 0; r < R; ++r)
          for (int c = 0; c < kQuadVectors; ++c)
            total[r][c] += (Ints)_mm256_madd_epi16(pairs[r][c], _mm256_set1_epi16(1));
#endif
    }
    for (int r = 0; r < R; ++r) {
      int64_t at = (m + r) * x.block_stride + b + i;
      for (int c = 0; c < kQuadVectors; ++c) {
        Floats scale = Load<Floats>(scales[c] + i * kLanes) * x.scale[at];
        sum[r][c] += __builtin_convertvector(total[r][c], Floats) * scale;
        if constexpr (kShift) sum[r][c] += Load<Floats>(shifts[c] + i * kLanes) * x.sums[at];
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < kQuadVectors; ++c) {
      float lanes[kLanes];
      Store(lanes, sum[r][c]);
      float* to = out[r] + n + c * kLanes;
      for (int64_t i = 0; i < std::min<int64_t>(kLanes, outputs - c * kLanes); ++i) to[i] = lanes[i] + (add ? to[i] : 0);
    }
}

// As GemmChunk of float_dot.h, of at most kQuadOutputs outputs.
template <class Q, bool kShift>
void QuadChunk(const Matrix& w, const Activations& x, float* const* out, int64_t begin, int64_t end) {
  constexpr int64_t kVectorsABlock = kQuadOutputs / kLanes;
  alignas(64) uint8_t quads[kVectorsABlock][kQuadBlocks * kBlock * kLanes];
  alignas(64) float scales[kVectorsABlock][kQuadBlocks * kLanes], shifts[kVectorsABlock][kQuadBlocks * kLanes];
  constexpr int64_t kStep = kQuadVectors * kLanes;
  for (int64_t b = 0; b < w.blocks; b += kQuadBlocks) {
    int64_t count = std::min(kQuadBlocks, w.blocks - b), vectors = (end - begin + kStep - 1) / kStep * kQuadVectors;
    for (int64_t v = 0; v < vectors; ++v)
      WriteQuads<Q, kShift>(w, begin + v * kLanes, end, b, count, quads[v], scales[v], shifts[v]);
    for (int64_t m = 0; m < x.rows; m += kQuadRows)
      Unrolled<kQuadRows>(x.rows - m, [&](auto rows) {
        for (int64_t v = 0; v < vectors; v += kQuadVectors) {
          const uint8_t* tile[kQuadVectors];
          const float *scale[kQuadVectors], *shift[kQuadVectors];
          for (int c = 0; c < kQuadVectors; ++c) tile[c] = quads[v + c], scale[c] = scales[v + c], shift[c] = shifts[v + c];
          int64_t n = begin + v * kLanes;
          QuadTile<Q, kShift, rows.value>(x, m, b, count, tile, scale, shift, b > 0, out + m, n, end - n);
        }
      });
  }
}

}  // namespace
