// A matrix of weights in its storage layout (quant/formats.py), and the scale and shift of each block of it:
// value = stored · scale + shift.

#pragma once

#include <algorithm>
#include <cstdint>

#include "simd.h"

namespace {

constexpr int kBlock = 32;  // weights unpacked at a time; groups are of one or more whole blocks
constexpr int kVectors = kBlock / kLanes;

// How values are stored, in the order of VALUES in ops/native_weights.py.
enum class Values { kF32, kBf16, kF16, kFp8, kInt8, kInt4, kE2m1 };
enum class ScaleType { kNone, kF32, kBf16, kF16, kE8m0 };

// [outputs, inputs] with one scale for `group_blocks` blocks of an output, or for all of them (groups = 1), or none.
// The shift is −offset · scale, −zero · scale or a minimum.
struct Matrix {
  const uint8_t *values, *scale, *zero, *minimum;
  int64_t outputs, inputs, row_bytes, blocks, groups, group_blocks;
  Values stored;
  ScaleType scale_type;
  float offset;

  bool grouped() const { return groups > 1 || group_blocks > 0; }
  bool shifted() const { return zero || minimum || offset != 0; }
};

inline int64_t BytesOf(ScaleType type) {
  return type == ScaleType::kF32 ? 4 : type == ScaleType::kE8m0 ? 1 : type == ScaleType::kNone ? 0 : 2;
}

inline float ScaleAt(ScaleType type, const uint8_t* scales, int64_t i) {
  switch (type) {
    case ScaleType::kF32:
      return Load<float>(scales + i * 4);
    case ScaleType::kBf16:
      return Widen(Load<uint16_t>(scales + i * 2));
    case ScaleType::kF16: {
      uint16_t half[kLanes] = {Load<uint16_t>(scales + i * 2)};
      return FromHalf(Load<Halves>(half))[0];
    }
    case ScaleType::kE8m0: {
      uint32_t bits = scales[i] == 255 ? 0x7fc00000 : uint32_t{scales[i]} << 23;
      return Load<float>(&bits);
    }
    case ScaleType::kNone:
      break;
  }
  return 1;
}

// float32 of `count` scales from `at` on; up to kLanes − 1 beyond them are written.
inline void WidenScales(ScaleType type, const uint8_t* scales, int64_t at, int64_t count, float* out) {
  if (type == ScaleType::kF16 || type == ScaleType::kBf16) {
    for (int64_t i = 0; i < count; i += kLanes) {
      const uint8_t* p = scales + (at + i) * 2;
      Halves h{};
      if (count - i >= kLanes) {
        h = Load<Halves>(p);
      } else {
        std::memcpy(&h, p, (count - i) * 2);
      }
      Store(out + i, type == ScaleType::kF16 ? FromHalf(h) : FromBf16(h));
    }
    return;
  }
  if (type == ScaleType::kE8m0) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) Store(out + i, FromE8m0(scales + at + i));
    for (; i < count; ++i) out[i] = ScaleAt(type, scales, at + i);
    return;
  }
  std::memcpy(out, scales + at * 4, count * 4);
}

// Scales and shifts of a tile of at most kOutputs × kBlocks: those of output i begin at i · pitch. What follows the last
// of an output is its neighbour's, or anything.
template <int64_t kOutputs, int64_t kBlocks>
struct TileScales {
  int64_t pitch = 0;
  float scale[kOutputs * kBlocks + kLanes], shift[kOutputs * kBlocks + kLanes];

  // Of blocks [b, b + count) of outputs [n, n + outputs). scale is multiplied by `unit`; `offset` is subtracted from
  // the stored number besides the matrix's own.
  template <bool kShift>
  void Read(const Matrix& w, int64_t n, int64_t outputs, int64_t b, int64_t count, float unit, float offset) {
    if (w.group_blocks == 1 && count == w.blocks) {
      pitch = count;
      return Convert<kShift>(w, n * w.groups, outputs * count, unit, offset, scale, shift);
    }
    pitch = kBlocks;
    for (int64_t i = 0; i < outputs; ++i) {
      float *scales = scale + i * pitch, *shifts = shift + i * pitch;
      int64_t row = (n + i) * w.groups;
      if (w.group_blocks == 1) {
        Convert<kShift>(w, row + b, count, unit, offset, scales, shifts);
        continue;
      }
      int64_t per = w.group_blocks > 0 ? w.group_blocks : w.blocks;
      for (int64_t j = 0; j < count;) {
        float one[kLanes], other[kLanes];
        int64_t group = (b + j) / per, stop = std::min(count, (group + 1) * per - b);
        Convert<kShift>(w, row + group, 1, unit, offset, one, other);
        for (; j < stop; ++j) {
          scales[j] = one[0];
          if constexpr (kShift) shifts[j] = other[0];
        }
      }
    }
  }

 private:
  template <bool kShift>
  static void Convert(const Matrix& w, int64_t at, int64_t count, float unit, float offset, float* scale,
                      float* shift) {
    WidenScales(w.scale_type, w.scale, at, count, scale);
    if constexpr (kShift) {
      if (w.minimum) {
        WidenScales(w.scale_type, w.minimum, at, count, shift);
        if (offset != 0)
          for (int64_t i = 0; i < count; ++i) shift[i] -= offset * unit * scale[i];
      } else if (w.zero) {
        for (int64_t i = 0; i < count; ++i) shift[i] = -(w.zero[at + i] + offset) * unit * scale[i];
      } else {
        for (int64_t i = 0; i < count; ++i) shift[i] = -(w.offset + offset) * unit * scale[i];
      }
    }
    if (unit != 1)
      for (int64_t i = 0; i < count; ++i) scale[i] *= unit;
  }
};

// The first `count` lanes, and zeros.
inline Floats UpTo(Floats v, int64_t count) {
  if (count >= kLanes) return v;
  Ints lane{};
  for (int l = 0; l < kLanes; ++l) lane[l] = l;
  return lane < int32_t(count) ? v : Floats{};
}

// Σ a · b over `count` elements, a vector at a time; what lies behind a's last is left out.
inline Floats DotShifts(const float* a, const float* b, int64_t count) {
  Floats sum{};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) sum += Load<Floats>(a + i) * Load<Floats>(b + i);
  if (i < count) sum += UpTo(Load<Floats>(a + i), count - i) * Load<Floats>(b + i);
  return sum;
}

}  // namespace
