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
};

inline int64_t BytesOf(ScaleType type) {
  return type == ScaleType::kF32 ? 4 : type == ScaleType::kE8m0 ? 1 : type == ScaleType::kNone ? 0 : 2;
}

// `count` numbers of a vector, and zeros.
inline Floats ScalesFrom(ScaleType type, const uint8_t* scales, int64_t at, int64_t count) {
  switch (type) {
    case ScaleType::kF32:
      return LoadUpTo<Floats>(scales + at * 4, count);
    case ScaleType::kBf16:
      return FromBf16(LoadUpTo<Halves>(scales + at * 2, count));
    case ScaleType::kF16:
      return FromHalf(LoadUpTo<Halves>(scales + at * 2, count));
    case ScaleType::kE8m0:
      return FromE8m0(LoadUpTo<UBytes>(scales + at, count));
    case ScaleType::kNone:
      break;
  }
  return Splat(1);
}

inline float ScaleAt(ScaleType type, const uint8_t* scales, int64_t i) { return ScalesFrom(type, scales, i, 1)[0]; }

// The first `count` lanes, and zeros.
inline Floats UpTo(Floats v, int64_t count) {
  if (count >= kLanes) return v;
  return Lanes() < int32_t(count) ? v : Floats{};
}

struct BlockScales {
  Floats scale, shift;
};

// Those of blocks [b, b + kLanes) of output n, zeros behind its last. The scale is multiplied by `unit`; `offset` is
// subtracted from the stored number besides the matrix's own.
template <bool kShift>
inline BlockScales ScalesOf(const Matrix& w, int64_t n, int64_t b, float unit, float offset) {
  int64_t count = std::min<int64_t>(kLanes, w.blocks - b), at = n * w.groups + b, groups = count;
  int64_t per = w.group_blocks > 0 ? w.group_blocks : w.blocks;
  if (per > 1) at = n * w.groups + b / per, groups = (b + count - 1) / per - b / per + 1;
  BlockScales read{ScalesFrom(w.scale_type, w.scale, at, groups), {}};
  if constexpr (kShift) {
    if (w.minimum)
      read.shift = ScalesFrom(w.scale_type, w.minimum, at, groups) - (w.offset + offset) * unit * read.scale;
    else if (w.zero)
      read.shift = (FromUnsigned(LoadUpTo<UBytes>(w.zero + at, groups)) + offset) * -unit * read.scale;
    else
      read.shift = -(w.offset + offset) * unit * read.scale;
  }
  if (unit != 1) read.scale *= unit;
  if (per > 1) {
    // Lane / per: the half keeps the product off whole numbers.
    Floats group = (__builtin_convertvector(Lanes(), Floats) + (float(b % per) + 0.5f)) * (1.0f / float(per));
    Ints index = __builtin_convertvector(group, Ints);
    read.scale = UpTo(Spread(read.scale, index), count);
    if constexpr (kShift) read.shift = UpTo(Spread(read.shift, index), count);
  }
  return read;
}

}  // namespace
