// Each head's vectors times its own rows of a matrix on CPU, an XLA FFI handler: out[m, h] = x[m, h] · W_h for the rows
// W_h [N, K] of head h in W[index] [H · N, K]. The sum runs over the rows, so a head's are written out as float32 once
// and added up a few vectors of inputs at a time.

#include "arguments.h"
#include "lines.h"
#include "product.h"

namespace {

constexpr int kHeadRows = 4, kHeadVectors = 4;  // register tile

// Adds up R rows of x [N, R] times kHeadVectors vectors of `wide`, whose rows are `pitch` apart.
template <int R>
inline void SumRows(const float* x, const float* wide, int64_t pitch, int64_t rows, float* sums, int64_t sums_pitch) {
  Floats sum[R][kHeadVectors] = {};
  for (int64_t n = 0; n < rows; ++n, wide += pitch, x += kHeadRows)
    for (int v = 0; v < kHeadVectors; ++v) {
      Floats value = Load<Floats>(wide + v * kLanes);
      for (int r = 0; r < R; ++r) sum[r][v] += x[r] * value;
    }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kHeadVectors; ++v) Store(sums + r * sums_pitch + v * kLanes, sum[r][v]);
}

// out [M, H, inputs] of x [M, H, rows], float32 or bfloat16.
template <class Pool>
void AbsorbInto(Pool& pool, const Matrix& w, const void* x, bool is_bf16, int64_t tokens, int64_t heads, int64_t rows,
                int64_t inputs, float* out) {
  Product product = ProductOf(w, 1, false);
  // Whole register tiles; what lies behind the last block is added up, and left.
  int64_t step = kHeadVectors * kLanes, pitch = (w.blocks * kBlock + step - 1) / step * step;
  Parallel(pool, heads, [&](int64_t h) {
    Lines<float> wide, sums, own;
    wide.resize(rows * pitch), sums.resize(kHeadRows * pitch), own.resize(rows * kHeadRows);
    std::fill_n(wide.data(), rows * pitch, 0.0f);
    for (int64_t n = 0; n < rows; ++n)
      for (int64_t b = 0; b < w.blocks; b += kGemmBlocks)
        product.write(w, h * rows + n, b, std::min(kGemmBlocks, w.blocks - b), wide.data() + n * pitch + b * kBlock);
    for (int64_t m = 0; m < tokens; m += kHeadRows) {
      int64_t count = std::min<int64_t>(kHeadRows, tokens - m);
      for (int64_t r = 0; r < count; ++r)
        for (int64_t n = 0; n < rows; ++n) {
          int64_t at = ((m + r) * heads + h) * rows + n;
          own.data()[n * kHeadRows + r] = is_bf16 ? Widen(static_cast<const uint16_t*>(x)[at])
                                                  : static_cast<const float*>(x)[at];
        }
      Unrolled<kHeadRows>(count, [&](auto unrolled) {
        for (int64_t k = 0; k < pitch; k += step)
          SumRows<unrolled.value>(own.data(), wide.data() + k, pitch, rows, sums.data() + k, pitch);
      });
      for (int64_t r = 0; r < count; ++r) {
        float* to = out + ((m + r) * heads + h) * inputs;
        for (int64_t k = 0; k < inputs; ++k) {
          int64_t position = PositionOf(product.order, k);
          to[k] = sums.data()[r * pitch + position] * UnitOf(product.order, position);
        }
      }
    }
  });
}

ffi::Error Absorb(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> index, ffi::RemainingArgs rest,
                  ffi::Result<ffi::Buffer<ffi::F32>> out, ffi::Span<const int64_t> layout) {
  auto shape = x.dimensions();
  if (shape.size() != 3 || (x.element_type() != ffi::DataType::F32 && x.element_type() != ffi::DataType::BF16))
    return ffi::Error::InvalidArgument("absorb takes x [M, H, N] in float32 or bfloat16");
  auto stacks = ReadStacks(rest, 0, layout, 3);
  if (!stacks) return stacks.error();
  int64_t tokens = shape[0], heads = shape[1], rows = shape[2], inputs = out->dimensions().back();
  const Stack& stack = (*stacks)[0];
  if (stack.count < 1 || stack.first.outputs != heads * rows || inputs > stack.first.inputs ||
      int64_t(out->element_count()) != tokens * heads * inputs)
    return ffi::Error::InvalidArgument("absorb's shapes of x, weight and result do not fit together");
  const Matrix w = stack.at(std::clamp<int64_t>(*index.typed_data(), 0, stack.count - 1));
  AbsorbInto(pool, w, x.untyped_data(), x.element_type() == ffi::DataType::BF16, tokens, heads, rows, inputs,
             out->typed_data());
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxwaferAbsorb, Absorb,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<ffi::Span<const int64_t>>("layout"));
