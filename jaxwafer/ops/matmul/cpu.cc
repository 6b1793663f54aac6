// Quantised matmul on CPU, an XLA FFI handler: out[M, N] = x[M, K] · W[index]ᵀ for one or several stacks of weights W
// [S, N, K] in the storage layout of quant/formats.py, which share the rows of x; x may be normed first, and two results
// may be joined by an activation.

#include "activation.h"
#include "arguments.h"
#include "product.h"

namespace {

struct Task {
  size_t weight;
  int64_t begin, end;
};

ffi::Error Matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> index, ffi::RemainingArgs rest,
                  ffi::RemainingRets outs, ffi::Span<const int64_t> layout, ffi::Span<const float> limits,
                  int64_t join_number, bool normed, float eps, bool quantise) {
  Join join = Join(join_number);
  if (x.dimensions().size() != 2 || (x.element_type() != ffi::DataType::F32 && x.element_type() != ffi::DataType::BF16))
    return ffi::Error::InvalidArgument("matmul takes x [M, K] in float32 or bfloat16");
  auto stacks = ReadStacks(rest, normed, layout, 3);
  if (!stacks) return stacks.error();
  Source source{x.untyped_data(), x.element_type() == ffi::DataType::BF16, x.dimensions()[0], x.dimensions()[1],
                nullptr, eps};
  size_t results = join == Join::kNone ? stacks->size() : 1;
  if (stacks->empty() || outs.size() != results || (join != Join::kNone && stacks->size() != 2))
    return ffi::Error::InvalidArgument("matmul's weights and results do not fit together");
  int64_t count = (*stacks)[0].count;
  if (count < 1) return ffi::Error::InvalidArgument("matmul takes a stack of at least one matrix");
  int64_t at = std::clamp<int64_t>(*index.typed_data(), 0, count - 1);  // as XLA clamps the start of a slice
  if (normed) {
    auto norm = rest.get<ffi::Buffer<ffi::F32>>(0);
    if (!norm) return norm.error();
    if (norm->dimensions().back() != source.inputs)
      return ffi::Error::InvalidArgument("the norm's weight and x do not fit together");
    source.norm = norm->typed_data() + std::min<int64_t>(at, norm->dimensions()[0] - 1) * source.inputs;
  }

  std::vector<Matrix> weights;
  std::vector<Product> products;
  std::vector<std::vector<float*>> rows(stacks->size());
  std::unique_ptr<float[]> second;  // the result that is joined into the first
  for (size_t i = 0; i < stacks->size(); ++i) {
    weights.push_back((*stacks)[i].at(at));
    const Matrix& w = weights.back();
    bool pairs = join == Join::kNone || w.outputs == weights[0].outputs;
    if (source.inputs > w.inputs || (*stacks)[i].count != count || !pairs)
      return ffi::Error::InvalidArgument("matmul's shapes of x and weights do not fit together");
    float* data;
    if (i < results) {
      auto out = outs.get<ffi::Buffer<ffi::F32>>(i);
      if (!out) return out.error();
      if (int64_t((*out)->element_count()) != source.rows * w.outputs)
        return ffi::Error::InvalidArgument("matmul's result has a wrong shape");
      data = (*out)->typed_data();
    } else {
      second.reset(new float[source.rows * w.outputs]);
      data = second.get();
    }
    if (w.blocks == 0) std::fill_n(data, source.rows * w.outputs, 0.0f);
    for (int64_t m = 0; m < source.rows; ++m) rows[i].push_back(data + m * w.outputs);
    products.push_back(ProductOf(w, source.rows, quantise));
  }
  if (source.rows == 0) return ffi::Error::Success();

  // Weights that want x in the same form share it.
  std::vector<std::unique_ptr<Arranged>> forms;
  std::vector<Activations> from;
  for (size_t i = 0; i < weights.size(); ++i) {
    size_t same = i;
    for (size_t j = 0; j < i; ++j)
      if (products[j].SameRows(products[i]) && weights[j].blocks == weights[i].blocks &&
          products[j].sums >= products[i].sums)
        same = j;
    if (same == i)
      forms.push_back(std::make_unique<Arranged>(pool, source, weights[i].blocks, products[i].order,
                                                 products[i].quantise, products[i].sums));
    from.push_back(same == i ? forms.back()->view : from[same]);
  }

  std::vector<Task> tasks;
  for (size_t i = 0; i < results; ++i) {
    int64_t step = products[i].step;
    if (join != Join::kNone) step = std::min(step, products[1].step);
    for (int64_t n = 0; n < weights[i].outputs; n += step)
      if (weights[i].blocks) tasks.push_back({i, n, std::min(n + step, weights[i].outputs)});
  }
  Parallel(pool, int64_t(tasks.size()), [&](int64_t number) {
    auto [i, begin, end] = tasks[number];
    products[i].chunk(weights[i], from[i], rows[i].data(), begin, end);
    if (join == Join::kNone) return;
    products[1].chunk(weights[1], from[1], rows[1].data(), begin, end);
    for (int64_t m = 0; m < source.rows; ++m)
      JoinInto(join, limits.begin(), rows[0][m] + begin, rows[1][m] + begin, end - begin);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxwaferMatmul, Matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<ffi::Span<const int64_t>>("layout")
                                  .Attr<ffi::Span<const float>>("limits")
                                  .Attr<int64_t>("join")
                                  .Attr<bool>("normed")
                                  .Attr<float>("eps")
                                  .Attr<bool>("quantise"));
