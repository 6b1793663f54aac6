// Products of rows of float32 with weights widened to float32, accumulated in float32.
//
// Both operands run along K, so a dot product may take K in any order: a format names the order in which it unpacks
// fastest, and x is rearranged to it once. Few rows of x: unpack in registers and multiply at once (Dot), which is bound
// by reading the weights. Many rows: write out tiles of weights and multiply those (Tile).

#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "activations.h"

namespace {

constexpr int kDotRows = 4;                             // most rows of x that share one unpacking
constexpr int64_t kDotLimit = 16;                       // most rows of x that are not worth a tile
constexpr int64_t kDotOutputs = 16, kDotBlocks = 32;    // a tile of weights that several rows of x meet
constexpr int kTileRows = kLanes == 16 ? 6 : 3;         // register tile: 12 of 16 registers add up, or 24 of 32
constexpr int kTileOutputs = 4;
constexpr int64_t kGemmOutputs = 32, kGemmBlocks = 32;  // tile of written-out weights: 128 KiB
constexpr int64_t kGemmRows = 48;                       // of x, that meet it before the next

// Asks for the lines two pages beyond p, since the hardware looks ahead no further than its page.
inline void ReadAhead(const uint8_t* p, int64_t bytes) { AskFor(p + 8192, bytes); }

// Calls f with the integral constant of count, 1 to Most.
template <int Most, class Function>
inline void Unrolled(int64_t count, const Function& f) {
  if constexpr (Most > 1) {
    if (count < Most) return Unrolled<Most - 1>(count, f);
  }
  f(std::integral_constant<int, Most>{});
}

// A format: bytes in a block of 32 weights, and Unpack to floats that still want the scale and kUnit. kOrder: of x.
struct F32 {
  static constexpr int kBytes = 128;
  static constexpr float kUnit = 1;
  static constexpr Order kOrder = Order::kNatural;
  static void Unpack(const uint8_t* p, Floats* w) {
    for (int v = 0; v < kVectors; ++v) w[v] = Load<Floats>(p + v * kLanes * 4);
  }
};

struct Bf16 : F32 {
  static constexpr int kBytes = 64;
  static void Unpack(const uint8_t* p, Floats* w) {
    for (int v = 0; v < kVectors; ++v) w[v] = FromBf16(Load<Halves>(p + v * kLanes * 2));
  }
};

struct F16 : F32 {
  static constexpr int kBytes = 64;
  static void Unpack(const uint8_t* p, Floats* w) {
    for (int v = 0; v < kVectors; ++v) w[v] = FromHalf(Load<Halves>(p + v * kLanes * 2));
  }
};

struct Fp8 : F32 {
  static constexpr int kBytes = 32;
  static constexpr float kUnit = kFp8Unit;
  static void Unpack(const uint8_t* p, Floats* w) {
    for (int v = 0; v < kVectors; ++v) w[v] = FromFp8(p + v * kLanes);
  }
};

struct Int8 : F32 {
  static constexpr int kBytes = 32;
  static void Unpack(const uint8_t* p, Floats* w) {
    for (int v = 0; v < kVectors; ++v) w[v] = FromBytes(p + v * kLanes);
  }
};

// The 16 bytes of a block are 4 words of 8 nibbles. A vector takes kLanes / 4 nibbles from all 4 words, masked where
// they stand and not shifted down, which leaves them multiplied by a power of 16.
struct Int4 : F32 {
  static constexpr int kBytes = 16;
  static constexpr Order kOrder = Order::kStrided;
  static void Unpack(const uint8_t* p, Floats* w) {
    Words words = Repeat(p);
    for (int v = 0; v < kVectors; ++v) {
      Words mask{};
      for (int i = 0; i < kLanes; ++i) mask[i] = 15u << (v * kLanes + i) / 4 % 4 * 4;
      Words masked = (v * kLanes < kBlock / 2 ? words : words >> 16) & mask;
      w[v] = __builtin_convertvector((Ints)masked, Floats);
    }
  }
};

// Twice the value of each nibble of e2m1.
alignas(16) constexpr int8_t kE2m1Doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Bytes looked up, the even ones of a block and then the odd ones.
struct E2m1 : F32 {
  static constexpr int kBytes = 16;
  static constexpr float kUnit = 0.5f;
  static constexpr Order kOrder = Order::kPaired;
  static void Unpack(const uint8_t* p, Floats* w) {
    int8_t bytes[kBlock];
#if JAXWAFER_LANES >= 8
    __m128i packed = Load<__m128i>(p), low = _mm_set1_epi8(15), table = Load<__m128i>(kE2m1Doubled);
    Store(bytes, _mm_shuffle_epi8(table, _mm_and_si128(packed, low)));
    Store(bytes + 16, _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(packed, 4), low)));
#else
    for (int i = 0; i < 16; ++i) bytes[i] = kE2m1Doubled[p[i] & 15], bytes[16 + i] = kE2m1Doubled[p[i] >> 4];
#endif
    for (int v = 0; v < kVectors; ++v) w[v] = FromBytes(bytes + v * kLanes);
  }
};

// The weights of block b, or, where the row ends within it, a copy filled up with zeros.
template <class F>
inline const uint8_t* Block(const Matrix& w, const uint8_t* row, int64_t b, uint8_t* spare) {
  int64_t left = w.row_bytes - b * F::kBytes;
  if (left >= F::kBytes) return row + b * F::kBytes;
  std::memset(spare, 0, F::kBytes);
  std::memcpy(spare, row + b * F::kBytes, left);
  return spare;
}

template <class F>
inline float RowScale(const Matrix& w, int64_t n) {
  return w.scale ? ScaleAt(w.scale_type, w.scale, n) * F::kUnit : F::kUnit;
}

// Adds blocks [b, b + count) of output n, R rows of x from m, to `sums` [rows of x].
template <class F, bool kGrouped, bool kShift, int R>
inline void Dot(const Matrix& w, const Activations& x, int64_t n, int64_t m, int64_t b, int64_t count, Floats* sums) {
  constexpr int kChains = R == 1 ? 4 : 2;
  const uint8_t* row = w.values + n * w.row_bytes;
  const float* from = x.values + m * x.stride;
  Floats sum[R][kChains];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < kChains; ++c) sum[r][c] = c == 0 ? sums[m + r] : Floats{};
  float scale[kLanes];
  auto add = [&](const uint8_t* bytes, int64_t block, int chain) {
    Floats value[kVectors];
    if (R == 1) ReadAhead(bytes, F::kBytes);
    F::Unpack(bytes, value);
    for (int r = 0; r < R; ++r) {
      const float* at = from + r * x.stride + block * kBlock;
      if constexpr (kGrouped) {
        Floats group = value[0] * Load<Floats>(at);
        for (int v = 1; v < kVectors; ++v) group += value[v] * Load<Floats>(at + v * kLanes);
        sum[r][chain] += group * scale[block % kLanes];
      } else {
        for (int v = 0; v < kVectors; ++v) sum[r][v % kChains] += value[v] * Load<Floats>(at + v * kLanes);
      }
    }
  };
  uint8_t spare[F::kBytes];
  for (int64_t first = b; first < b + count; first += kLanes) {
    if constexpr (kGrouped) {
      BlockScales own = ScalesOf<kShift>(w, n, first, F::kUnit, 0);
      Store(scale, own.scale);
      if constexpr (kShift)
        for (int r = 0; r < R; ++r) sum[r][1] += own.shift * Load<Floats>(x.sums + (m + r) * x.block_stride + first);
    }
    if ((first + kLanes) * F::kBytes <= w.row_bytes) {
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; ++i) add(row + (first + i) * F::kBytes, first + i, i % 2);
    } else {
      for (int64_t i = first; i < w.blocks; ++i) add(Block<F>(w, row, i, spare), i, 0);
    }
  }
  for (int r = 0; r < R; ++r) {
    Floats total = sum[r][0] + sum[r][1];
    for (int c = 2; c < kChains; ++c) total += sum[r][c];
    sums[m + r] = total;
  }
}

// Several rows of x take a tile of [outputs, blocks] in pieces that stay in the first-level cache; one reads straight on.
inline std::pair<int64_t, int64_t> DotTile(const Matrix& w, const Activations& x) {
  return x.rows == 1 ? std::pair(int64_t{1}, w.blocks) : std::pair(kDotOutputs, kDotBlocks);
}

// out[m][n] for all rows of x and outputs [begin, end).
template <class F, bool kGrouped, bool kShift>
void DotChunk(const Matrix& w, const Activations& x, float* const* out, int64_t begin, int64_t end) {
  Floats sums[kDotOutputs * kDotLimit];
  const std::pair<int64_t, int64_t> shape = DotTile(w, x);
  const int64_t outputs = shape.first, blocks = shape.second;
  for (; begin < end; begin += outputs) {
    int64_t tile = std::min(outputs, end - begin);
    std::fill_n(sums, tile * x.rows, Floats{});
    for (int64_t b = 0; b < w.blocks; b += blocks)
      for (int64_t m = 0; m < x.rows; m += kDotRows)
        Unrolled<kDotRows>(x.rows - m, [&](auto rows) {
          for (int64_t n = 0; n < tile; ++n)
            Dot<F, kGrouped, kShift, rows.value>(w, x, begin + n, m, b, std::min(blocks, w.blocks - b), sums + n * x.rows);
        });
    for (int64_t n = 0; n < tile; ++n)
      for (int64_t m = 0; m < x.rows; ++m)
        out[m][begin + n] = Sum(sums[n * x.rows + m]) * (kGrouped ? 1 : RowScale<F>(w, begin + n));
  }
}

// Writes the weights of output n, blocks [b, b + count ≤ kGemmBlocks), in the format's order.
template <class F, bool kGrouped, bool kShift>
void WriteOut(const Matrix& w, int64_t n, int64_t b, int64_t count, float* out) {
  const uint8_t* row = w.values + n * w.row_bytes;
  uint8_t spare[F::kBytes];
  float unit[kBlock];
  float scale[kGemmBlocks], shift[kGemmBlocks];
  for (int i = 0; i < kBlock; ++i) unit[i] = F::kOrder == Order::kStrided ? StridedUnit(i) : 1.0f;
  if constexpr (kGrouped)
    for (int64_t i = 0; i < count; i += kLanes) {
      BlockScales own = ScalesOf<kShift>(w, n, b + i, F::kUnit, 0);
      Store(scale + i, own.scale), Store(shift + i, own.shift);
    }
  else
    std::fill_n(scale, count, RowScale<F>(w, n));
  for (int64_t i = 0; i < count; ++i, out += kBlock) {
    Floats value[kVectors];
    F::Unpack(Block<F>(w, row, b + i, spare), value);
    for (int v = 0; v < kVectors; ++v) {
      value[v] *= scale[i];
      if constexpr (kShift) value[v] += shift[i] * Load<Floats>(unit + v * kLanes);
      Store(out + v * kLanes, value[v]);
    }
  }
}

// Adds (or, for the first inputs, writes) R rows of x times kTileOutputs rows of w, `size` inputs of both.
template <int R>
inline void Tile(const float* x, int64_t x_stride, const float* w, int64_t w_stride, int64_t size, bool add,
                 float* const* out, int64_t n, int64_t outputs) {
  Floats sum[R][kTileOutputs];
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < kTileOutputs; ++i) sum[r][i] = Floats{};
  for (int64_t k = 0; k < size; k += kLanes) {
    Floats value[R];
    for (int r = 0; r < R; ++r) value[r] = Keep(Load<Floats>(x + r * x_stride + k));
    for (int i = 0; i < kTileOutputs; ++i) {
      Floats weight = Keep(Load<Floats>(w + i * w_stride + k));
      for (int r = 0; r < R; ++r) sum[r][i] += value[r] * weight;
    }
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < kTileOutputs; ++i)
      if (i < outputs) out[r][n + i] = Sum(sum[r][i]) + (add ? out[r][n + i] : 0.0f);
}

// As DotChunk, of at most kGemmOutputs outputs.
template <class F, bool kGrouped, bool kShift>
void GemmChunk(const Matrix& w, const Activations& x, float* const* out, int64_t begin, int64_t end) {
  constexpr int64_t kPitch = kGemmBlocks * kBlock + 16;  // rows a power of two apart would share cache sets
  alignas(64) float tile[kGemmOutputs * kPitch];
  for (int64_t b = 0; b < w.blocks; b += kGemmBlocks) {
    int64_t count = std::min(kGemmBlocks, w.blocks - b);
    for (int64_t n = begin; n < end; ++n) WriteOut<F, kGrouped, kShift>(w, n, b, count, tile + (n - begin) * kPitch);
    for (int64_t n = end; n < begin + kGemmOutputs && (n - begin) % kTileOutputs; ++n)
      std::fill_n(tile + (n - begin) * kPitch, count * kBlock, 0.0f);
    for (int64_t top = 0; top < x.rows; top += kGemmRows)
      for (int64_t n = begin; n < end; n += kTileOutputs)
        for (int64_t m = top; m < std::min(top + kGemmRows, x.rows); m += kTileRows)
          Unrolled<kTileRows>(x.rows - m, [&](auto rows) {
            Tile<rows.value>(x.values + m * x.stride + b * kBlock, x.stride, tile + (n - begin) * kPitch, kPitch,
                             count * kBlock, b > 0, out + m, n, end - n);
          });
  }
}

}  // namespace
