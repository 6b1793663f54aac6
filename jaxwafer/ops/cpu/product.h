// The product of rows of x with one matrix of any format: which order of x it wants, and the functions that compute a
// chunk of its outputs.

#pragma once

#include "int8_dot.h"

namespace {

using Chunk = void (*)(const Matrix&, const Activations&, float* const*, int64_t begin, int64_t end);

// Writes blocks [b, b + count) of output n as float32, in the order of x.
using Write = void (*)(const Matrix&, int64_t n, int64_t b, int64_t count, float* out);

// step: most outputs of a chunk. write: null where x is quantised.
struct Product {
  Order order;
  bool quantise, sums;
  Chunk chunk;
  int64_t step;
  Write write;

  bool SameRows(const Product& other) const { return order == other.order && quantise == other.quantise; }
};

constexpr int64_t kChunkBytes = 32768;  // of weights, the unit of work with few rows

template <class F, bool kGrouped, bool kShift>
Product FloatProduct(const Matrix& w, bool few) {
  int64_t step = few ? std::max<int64_t>(1, kChunkBytes / std::max<int64_t>(1, w.row_bytes)) : kGemmOutputs;
  // Tiles have their shifts written in; the strided order needs x's own order of them.
  Chunk chunk = few ? DotChunk<F, kGrouped, kShift> : GemmChunk<F, kGrouped, kShift>;
  return {F::kOrder, false, few && kShift, chunk, step, WriteOut<F, kGrouped, kShift>};
}

template <class Q, bool kShift>
Product QuantProduct(const Matrix& w, bool few) {
  int64_t step = few ? std::max<int64_t>(1, kChunkBytes / std::max<int64_t>(1, w.row_bytes)) : kQuadOutputs;
  Order order = few ? Q::kOrder : Q::kQuads;
  return {order, true, true, few ? QuantDotChunk<Q, kShift> : QuadChunk<Q, kShift>, step, nullptr};
}

// quantise: rows of x may be rounded to int8, which is done for integer weights and e2m1.
inline Product ProductOf(const Matrix& w, int64_t rows, bool quantise) {
  bool few = rows <= (quantise ? 1 : kDotLimit);
  switch (w.stored) {
    case Values::kF32:
      return FloatProduct<F32, false, false>(w, few);
    case Values::kBf16:
      return FloatProduct<Bf16, false, false>(w, few);
    case Values::kF16:
      return FloatProduct<F16, false, false>(w, few);
    case Values::kFp8:
      return w.group_blocks ? FloatProduct<Fp8, true, false>(w, few) : FloatProduct<Fp8, false, false>(w, few);
    case Values::kInt8:
      if (quantise) return QuantProduct<QuantInt8, (QuantInt8::kOffset != 0)>(w, few);
      return w.group_blocks ? FloatProduct<Int8, true, false>(w, few) : FloatProduct<Int8, false, false>(w, few);
    case Values::kInt4:
      return quantise ? QuantProduct<QuantInt4, true>(w, few) : FloatProduct<Int4, true, true>(w, few);
    case Values::kE2m1:
      break;
  }
  return quantise ? QuantProduct<QuantE2m1, true>(w, few) : FloatProduct<E2m1, true, false>(w, few);
}

}  // namespace
