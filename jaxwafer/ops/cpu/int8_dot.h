// Products of rows of x quantised to int8 in blocks of 32 with integer weights: whole numbers within a block, float32
// beyond it. One row of x: as Dot of float_dot.h. Several: tiles of weights are written out with kLanes outputs beside
// one another, so that nothing is added up across a vector and a scale belongs to a lane.

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
#endif

// The first `left` bytes of a vector, and zeros.
inline Raw ReadUpTo(const uint8_t* p, int64_t left) {
  if (left >= int64_t(sizeof(Raw))) return Load<Raw>(p);
#if JAXWAFER_LANES == 16
  return _mm512_maskz_loadu_epi8((uint64_t{1} << left) - 1, p);
#endif
  Raw raw{};
  std::memcpy(&raw, p, left);
  return raw;
}

// Unsigned numbers below 32, two to a byte: 4 lanes of sums a block. kOffset is added in Unsigned, besides the format's
// own offset; kUnit: of the number. kFlush: quads of products whose sums fit 16 bits. kOrder, kQuads: of x where few and
// where many rows of it meet the weights.
struct QuantInt4 {
  static constexpr int kBytes = 16, kLanesABlock = 4, kFlush = 8;
  static constexpr float kOffset = 0, kUnit = 1;
  static constexpr Order kOrder = Order::kPairedVector, kQuads = Order::kPaired;
  static Raw Unsigned(Raw nibbles) { return nibbles; }
  static Raw Quad(const Raw* packed, int q) { return q < 4 ? And(packed[q], 15) : HighNibbles(packed[q - 4]); }
};

// e2m1 as twice its value plus 12.
struct QuantE2m1 : QuantInt4 {
  alignas(16) static constexpr int8_t kTable[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
  static constexpr int kFlush = 4;
  static constexpr float kOffset = 12, kUnit = 0.5f;
  static Raw Unsigned(Raw nibbles) { return LookUp(kTable, nibbles); }
  static Raw Quad(const Raw* packed, int q) { return Unsigned(QuantInt4::Quad(packed, q)); }
};

// Bytes with a sign: unsigned with an offset of 128 for instructions that multiply unsigned by signed without
// saturating; on AVX2 they do, and the sign goes to the other factor.
struct QuantInt8 {
  static constexpr int kBytes = 32, kLanesABlock = kLanes == 4 ? 4 : 8, kFlush = 1;
  static constexpr float kOffset = kLanes == 8 ? 0 : 128, kUnit = 1;
  static constexpr Order kOrder = Order::kNatural, kQuads = Order::kNatural;
  static Raw Unsigned(Raw bytes) { return kOffset ? (Raw)((Words)bytes ^ 0x80808080u) : bytes; }
  static Raw Quad(const Raw* bytes, int q) { return Unsigned(bytes[q]); }
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
        part[i] = Q::Unsigned(rest > 0 ? ReadUpTo(p + i * sizeof(Raw), rest) : Raw{});
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

// Output n for one row of x.
template <class Q, bool kShift>
inline float QuantDot(const Matrix& w, const Activations& x, int64_t n) {
  using S = Span<Q>;
  const uint8_t* row = w.values + n * w.row_bytes;
  Ints index = Lanes() / Q::kLanesABlock;
  Floats sum{}, shifts{};
  for (int64_t first = 0; first < w.blocks; first += kLanes) {
    BlockScales own = ScalesOf<kShift>(w, n, first, Q::kUnit, Q::kOffset);
    Floats product = own.scale * Load<Floats>(x.scale + first);
    if constexpr (kShift) shifts += own.shift * Load<Floats>(x.sums + first);
    auto add = [&](int step, int64_t left) {
      int64_t block = first + step * S::kBlocks;
      ReadAhead(row + block * Q::kBytes, kLine);
      S span(row + block * Q::kBytes, left);
      sum += __builtin_convertvector(span.Dot(x.quantised + block * kBlock), Floats) *
             Spread(product, index + step * S::kBlocks);
    };
    if ((first + kLanes) * Q::kBytes <= w.row_bytes) {
#pragma GCC unroll 16
      for (int step = 0; step < Q::kLanesABlock; ++step) add(step, int64_t(sizeof(Raw)) * S::kParts);
    } else {
      for (int step = 0; step * S::kBlocks < w.blocks - first; ++step)
        add(step, w.row_bytes - (first + step * S::kBlocks) * Q::kBytes);
    }
  }
  return Sum(sum + shifts);
}

// out[0][n] for outputs [begin, end).
template <class Q, bool kShift>
void QuantDotChunk(const Matrix& w, const Activations& x, float* const* out, int64_t begin, int64_t end) {
  for (int64_t n = begin; n < end; ++n) out[0][n] = QuantDot<Q, kShift>(w, x, n);
}

// out[q][lane] = the q-th four bytes of the 16 at each lane's row.
inline void TransposeQuads(const uint8_t* const* rows, int64_t at, Raw* out) {
#if JAXWAFER_LANES >= 8
  auto row = [&](int i) { return Load<__m128i>(rows[i] + at); };
#endif
#if JAXWAFER_LANES == 16
  Raw v[4];
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm512_inserti32x4(_mm512_castsi128_si512(row(i)), row(i + 4), 1);
    v[i] = _mm512_inserti32x4(_mm512_inserti32x4(v[i], row(i + 8), 2), row(i + 12), 3);
  }
  Raw low[2] = {_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpacklo_epi32(v[2], v[3])};
  Raw high[2] = {_mm512_unpackhi_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[2], v[3])};
  out[0] = _mm512_unpacklo_epi64(low[0], low[1]), out[1] = _mm512_unpackhi_epi64(low[0], low[1]);
  out[2] = _mm512_unpacklo_epi64(high[0], high[1]), out[3] = _mm512_unpackhi_epi64(high[0], high[1]);
#elif JAXWAFER_LANES == 8
  Raw v[4];
  for (int i = 0; i < 4; ++i) v[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(row(i)), row(i + 4), 1);
  Raw low[2] = {_mm256_unpacklo_epi32(v[0], v[1]), _mm256_unpacklo_epi32(v[2], v[3])};
  Raw high[2] = {_mm256_unpackhi_epi32(v[0], v[1]), _mm256_unpackhi_epi32(v[2], v[3])};
  out[0] = _mm256_unpacklo_epi64(low[0], low[1]), out[1] = _mm256_unpackhi_epi64(low[0], low[1]);
  out[2] = _mm256_unpacklo_epi64(high[0], high[1]), out[3] = _mm256_unpackhi_epi64(high[0], high[1]);
#else
  for (int q = 0; q < 4; ++q)
    for (int i = 0; i < 4; ++i) std::memcpy(reinterpret_cast<uint8_t*>(out + q) + i * 4, rows[i] + at + q * 4, 4);
#endif
}

// [blocks, kLanes] of numbers that stand in rows of kQuadBlocks.
inline void TransposeFloats(const float (*rows)[kQuadBlocks], float* out) {
  const uint8_t* from[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) from[lane] = reinterpret_cast<const uint8_t*>(rows[lane]);
  for (int64_t i = 0; i < kQuadBlocks; i += 4) {
    Raw quad[4];
    TransposeQuads(from, i * 4, quad);
    for (int q = 0; q < 4; ++q) Store(out + (i + q) * kLanes, quad[q]);
  }
}

// Blocks [b, b + count) of kLanes outputs from n, four inputs of each output beside one another: [quads, kLanes, 4]
// bytes in the order kQuads, and [blocks, kLanes] scales and shifts. Outputs from `end` on are zeros.
template <class Q, bool kShift>
void WriteQuads(const Matrix& w, int64_t n, int64_t end, int64_t b, int64_t count, uint8_t* quads, float* scales,
                float* shifts) {
  constexpr int64_t kPiece = kQuadBlocks * Q::kBytes;
  alignas(64) uint8_t spare[kLanes][kPiece];
  alignas(64) float scale[kLanes][kQuadBlocks], shift[kLanes][kQuadBlocks];
  const uint8_t* rows[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    bool within = n + lane < end;
    const uint8_t* row = w.values + (n + lane) * w.row_bytes + b * Q::kBytes;
    int64_t stored = within ? std::min(kPiece, w.row_bytes - b * Q::kBytes) : 0;
    rows[lane] = row;
    if (stored < kPiece) {
      rows[lane] = spare[lane];
      std::memset(spare[lane], 0, kPiece);
      std::memcpy(spare[lane], row, stored);
    }
    // What is written next: the same rows, further on, or the next rows.
    const uint8_t* next = b + kQuadBlocks < w.blocks ? row + kPiece : row + kQuadOutputs * w.row_bytes - b * Q::kBytes;
    AskFor(next, kPiece);
    for (int64_t i = 0; i < kQuadBlocks; i += kLanes) {
      BlockScales own = within && i < count ? ScalesOf<kShift>(w, n + lane, b + i, Q::kUnit, Q::kOffset) : BlockScales{};
      Store(scale[lane] + i, own.scale), Store(shift[lane] + i, own.shift);
    }
  }
  TransposeFloats(scale, scales);
  if constexpr (kShift) TransposeFloats(shift, shifts);
  for (int64_t i = 0; i < count; ++i, quads += kBlock * kLanes) {
    Raw quad[8];
    for (int64_t part = 0; part < Q::kBytes / 16; ++part) TransposeQuads(rows, i * Q::kBytes + part * 16, quad + 4 * part);
    for (int q = 0; q < 8; ++q) Store(quads + q * int64_t(sizeof(Raw)), Q::Quad(quad, q));
  }
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
