// Rows of x as the kernels want them: normed, widened to float32 or quantised to int8 in blocks of 32, in the order in
// which a format unpacks its weights, zero beyond the given inputs.

#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>

#include "lines.h"
#include "parallel.h"
#include "weights.h"

namespace {

// The order of the inputs within blocks. kStrided: input k of a block at k % 8 · 4 + k / 8, divided by the power of 16
// that Int4::Unpack leaves in the weight there. kPaired: the even inputs of a block, then the odd ones. kPairedVector: the
// even ones of as many blocks as a vector has nibbles for, then their odd ones.
enum class Order { kNatural, kStrided, kPaired, kPairedVector };

constexpr int StridedPosition(int k) { return k % 8 * 4 + k / 8; }
constexpr float StridedUnit(int position) { return float(1 << position / 4 % 4 * 4); }

constexpr int64_t kScalePad = 16;  // blocks of zeros beyond a row's scales and sums, for whole vectors

// values: [rows, blocks · 32] float32 or int8. scale (of int8), sums (Σ x over each block): [rows, blocks], both zero
// for a few blocks more.
struct Activations {
  const float *values, *scale, *sums;
  const int8_t* quantised;
  int64_t rows, stride, block_stride;

  Activations from(int64_t row) const {
    Activations rest = *this;
    rest.rows -= row;
    if (values) rest.values += row * stride;
    if (quantised) rest.quantised += row * stride, rest.scale += row * block_stride;
    if (sums) rest.sums += row * block_stride;
    return rest;
  }
};

// What the caller has: [rows, inputs] float32 or bfloat16, and, if the rows are to be normed, the norm's weight; with a
// selection, `rows` of them in the order it names.
struct Source {
  const void* data;
  bool is_bf16;
  int64_t rows, inputs;
  const float* norm;
  float eps;
  const int64_t* selection = nullptr;

  const void* row(int64_t m) const {
    return static_cast<const uint8_t*>(data) + (selection ? selection[m] : m) * inputs * (is_bf16 ? 2 : 4);
  }

  // Row m as float32, normed in float32 and rounded to x's type as RMSNorm is, then zeros up to `padded`.
  void Widened(int64_t m, int64_t padded, float* out) const {
    if (is_bf16) {
      auto* bits = static_cast<const uint8_t*>(row(m));
      for (int64_t k = 0; k < inputs; ++k) out[k] = Widen(Load<uint16_t>(bits + 2 * k));
    } else {
      std::memcpy(out, row(m), inputs * 4);
    }
    std::fill(out + inputs, out + padded, 0.0f);
    if (!norm) return;
    Floats squares{};
    for (int64_t k = 0; k < padded; k += kLanes) squares += Load<Floats>(out + k) * Load<Floats>(out + k);
    float scale = 1.0f / std::sqrt(Sum(squares) / float(inputs) + eps);
    for (int64_t k = 0; k < inputs; ++k) out[k] = out[k] * scale * norm[k];
    if (is_bf16)
      for (int64_t k = 0; k < inputs; ++k) out[k] = RoundBf16(out[k]);
  }
};

// Of input k, where the even ones of each `span` come first.
constexpr int64_t PairedPosition(int64_t k, int64_t span) { return k / span * span + k % 2 * (span / 2) + k % span / 2; }
constexpr int64_t kVectorSpan = kLanes / 4 * kBlock;

// Where input k of float32 rows stands in an order, and what is in x's place there of a product with a written-out row.
constexpr int64_t PositionOf(Order order, int64_t k) {
  return order == Order::kNatural ? k : order == Order::kPaired ? PairedPosition(k, kBlock)
                                                                : k / kBlock * kBlock + StridedPosition(k % kBlock);
}
constexpr float UnitOf(Order order, int64_t position) {
  return order == Order::kStrided ? 1.0f / StridedUnit(position % kBlock) : 1.0f;
}

// Quantises a block to scale · q, |q| ≤ 127. A block with a number that is not finite gets NaN as its scale.
inline float QuantiseBlock(const float* x, int8_t* q) {
  Floats largest{}, bad{};
  for (int v = 0; v < kVectors; ++v) {
    Floats value = Load<Floats>(x + v * kLanes);
    largest = Max(largest, Max(value, -value));
    bad += value - value;
  }
  float most = Most(largest);
  float scale = most > 1e-30f ? most / 127 : 0, inverse = scale > 0 ? 127 / most : 0;
  if (!(Sum(bad) == 0)) return std::memset(q, 0, kBlock), std::numeric_limits<float>::quiet_NaN();
  constexpr float kMagic = 12582912.0f;
  int32_t wide[kBlock];
  for (int v = 0; v < kVectors; ++v) {
    Floats shifted = Load<Floats>(x + v * kLanes) * inverse + kMagic;
    Store(wide + v * kLanes, Load<Ints>(&shifted));
  }
  for (int k = 0; k < kBlock; ++k) q[k] = int8_t(wide[k] & 0xff);
  return scale;
}

// Owns what an Activations points to.
class Arranged {
 public:
  template <class Pool>
  Arranged(Pool& pool, const Source& x, int64_t blocks, Order order, bool quantise, bool sums) {
    int64_t padded = blocks * kBlock, scales = blocks + kScalePad;
    view.rows = x.rows, view.stride = padded, view.block_stride = scales;
    if (!quantise && !sums && order == Order::kNatural && !x.is_bf16 && !x.norm && !x.selection &&
        x.inputs == padded) {
      view.values = static_cast<const float*>(x.data);
      return;
    }
    if (quantise) {
      view.stride = (padded + kVectorSpan - 1) / kVectorSpan * kVectorSpan;
      quantised_.resize(x.rows * view.stride);
      scale_.resize(x.rows * scales);
      view.quantised = quantised_.data(), view.scale = scale_.data();
    } else {
      values_.resize(x.rows * padded);
      view.values = values_.data();
    }
    if (sums || quantise) sums_.resize(x.rows * scales), view.sums = sums_.data();
    constexpr int64_t kRows = 16;
    Parallel(pool, (x.rows + kRows - 1) / kRows, [&](int64_t part) {
      std::unique_ptr<float[]> row(new float[padded]);
      for (int64_t m = part * kRows; m < std::min((part + 1) * kRows, x.rows); ++m) {
        x.Widened(m, padded, row.get());
        quantise ? Quantise(row.get(), m, blocks, order) : Place(row.get(), m, blocks, order);
      }
    });
  }

  Activations view{};

 private:
  void Place(const float* row, int64_t m, int64_t blocks, Order order) {
    float* out = values_.data() + m * view.stride;
    for (int64_t b = 0; b < blocks; ++b, row += kBlock, out += kBlock) {
      if (view.sums) sums_.data()[m * view.block_stride + b] = BlockSum(row);
      if (order == Order::kNatural) {
        std::memcpy(out, row, kBlock * 4);
      } else if (order == Order::kStrided) {
        for (int k = 0; k < kBlock; ++k) {
          constexpr auto unit = [](int p) { return 1.0f / StridedUnit(p); };
          out[StridedPosition(k)] = row[k] * unit(StridedPosition(k));
        }
      } else {
        for (int k = 0; k < kBlock; ++k) out[PairedPosition(k, kBlock)] = row[k];
      }
    }
    if (view.sums) std::fill_n(sums_.data() + m * view.block_stride + blocks, kScalePad, 0.0f);
  }

  void Quantise(const float* row, int64_t m, int64_t blocks, Order order) {
    int8_t *out = quantised_.data() + m * view.stride, q[kBlock];
    float *scale = scale_.data() + m * view.block_stride, *sums = sums_.data() + m * view.block_stride;
    std::fill_n(scale + blocks, kScalePad, 0.0f);
    std::fill_n(sums + blocks, kScalePad, 0.0f);
    if (view.stride != blocks * kBlock) std::memset(out, 0, view.stride);
    for (int64_t b = 0; b < blocks; ++b) {
      scale[b] = QuantiseBlock(row + b * kBlock, q);
      int total = 0;
      for (int k = 0; k < kBlock; ++k) total += q[k];
      sums[b] = scale[b] * float(total);
      if (order == Order::kNatural) {
        std::memcpy(out + b * kBlock, q, kBlock);
      } else {
        int64_t span = order == Order::kPaired ? kBlock : kVectorSpan;
        int8_t *even = out + PairedPosition(b * kBlock, span), *odd = out + PairedPosition(b * kBlock + 1, span);
        for (int k = 0; k < kBlock / 2; ++k) even[k] = q[2 * k], odd[k] = q[2 * k + 1];
      }
    }
  }

  static float BlockSum(const float* block) {
    Floats sum{};
    for (int v = 0; v < kVectors; ++v) sum += Load<Floats>(block + v * kLanes);
    return Sum(sum);
  }

  Lines<float> values_, scale_, sums_;
  Lines<int8_t> quantised_;
};

}  // namespace
