// Quantised matmul of rows with the matrices of their experts on CPU, an XLA FFI handler: out[r] = x[r] ·
// W[index, experts[r]]ᵀ for a stack of weights W [S, E, N, K], or two such products joined by an activation; several
// rows in turn may share one of x. Rows are sorted by expert, and each expert's go through the same chunks as those of
// the dense product; experts that no row names are not read.

#include "activation.h"
#include "arguments.h"
#include "product.h"

namespace {

// The rows of one expert, `begin` to `end` in sorted order, and outputs from `first` on.
struct Task {
  int64_t expert, begin, end, first;
  Product product;
};

ffi::Error ExpertMatmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> index,
                        ffi::Buffer<ffi::S32> experts, ffi::RemainingArgs rest, ffi::Result<ffi::Buffer<ffi::F32>> out,
                        ffi::Span<const int64_t> layout, ffi::Span<const float> limits, int64_t join_number,
                        bool quantise) {
  Join join = Join(join_number);
  if (x.dimensions().size() != 2 || (x.element_type() != ffi::DataType::F32 && x.element_type() != ffi::DataType::BF16))
    return ffi::Error::InvalidArgument("expert_matmul takes x [R, K] in float32 or bfloat16");
  auto stacks = ReadStacks(rest, 0, layout, 4);
  if (!stacks) return stacks.error();
  if (stacks->size() != (join == Join::kNone ? 1 : 2))
    return ffi::Error::InvalidArgument("expert_matmul takes one weight, or two that are joined");
  auto shape = rest.get<ffi::AnyBuffer>(0)->dimensions();
  int64_t layers = shape[0], count = shape[1], rows = experts.element_count(), given = x.dimensions()[0];
  const Stack &stack = (*stacks)[0], &other = stacks->back();
  Source source{x.untyped_data(), x.element_type() == ffi::DataType::BF16, rows, x.dimensions()[1], nullptr, 0};
  int64_t outputs = stack.first.outputs, blocks = stack.first.blocks;
  // What is joined is of one format and shape, so that both products take the same rows of x.
  bool alike = other.first.outputs == outputs && other.first.blocks == blocks && other.count == stack.count &&
               other.first.stored == stack.first.stored && other.first.group_blocks == stack.first.group_blocks;
  if (source.inputs > stack.first.inputs || int64_t(out->element_count()) != rows * outputs || layers < 1 ||
      (given == 0 ? rows != 0 : rows % given != 0) || !alike)
    return ffi::Error::InvalidArgument("expert_matmul's shapes of x, weights and result do not fit together");
  if (out->element_count() == 0) return ffi::Error::Success();
  const int32_t* owner = experts.typed_data();
  int64_t layer = std::clamp<int64_t>(*index.typed_data(), 0, layers - 1);

  // Rows in the order of their experts; those of others are zero.
  std::vector<int64_t> order;
  for (int64_t r = 0; r < rows; ++r) {
    if (owner[r] >= 0 && owner[r] < count && blocks > 0)
      order.push_back(r);
    else
      std::fill_n(out->typed_data() + r * outputs, outputs, 0.0f);
  }
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return owner[a] < owner[b]; });
  std::vector<float*> targets;
  for (int64_t r : order) targets.push_back(out->typed_data() + r * outputs);

  // Few and many rows of an expert want x in other orders, so there may be two arranged copies of it.
  struct Form {
    Order order;
    std::vector<int64_t> rows;  // in sorted order
    std::unique_ptr<Arranged> arranged;
  };
  std::vector<Form> forms;
  std::vector<std::pair<size_t, int64_t>> places;  // of each sorted row: its form, and the row in it
  std::vector<Task> tasks;
  bool sums = false, quantised = false;
  for (size_t begin = 0, end; begin < order.size(); begin = end) {
    for (end = begin; end < order.size() && owner[order[end]] == owner[order[begin]];) ++end;
    Product product = ProductOf(stack.first, int64_t(end - begin), quantise);
    sums |= product.sums, quantised |= product.quantise;
    auto form = std::find_if(forms.begin(), forms.end(), [&](const Form& f) { return f.order == product.order; });
    if (form == forms.end()) form = forms.insert(forms.end(), Form{product.order, {}, nullptr});
    for (size_t i = begin; i < end; ++i) {
      places.push_back({size_t(form - forms.begin()), int64_t(form->rows.size())});
      form->rows.push_back(order[i] / (rows / given));
    }
    for (int64_t n = 0; n < outputs; n += product.step)
      tasks.push_back({owner[order[begin]], int64_t(begin), int64_t(end), n, product});
  }
  for (Form& form : forms) {
    source.selection = form.rows.data(), source.rows = int64_t(form.rows.size());
    form.arranged = std::make_unique<Arranged>(pool, source, blocks, form.order, quantised, sums);
  }
  std::unique_ptr<float[]> second(join == Join::kNone ? nullptr : new float[order.size() * outputs]);
  std::vector<float*> seconds;
  if (second)
    for (size_t i = 0; i < order.size(); ++i) seconds.push_back(second.get() + i * outputs);
  Parallel(pool, int64_t(tasks.size()), [&](int64_t i) {
    const Task& t = tasks[i];
    auto [form, row] = places[t.begin];
    Activations from = forms[form].arranged->view.from(row);
    from.rows = t.end - t.begin;
    int64_t at = layer * count + t.expert, last = std::min(t.first + t.product.step, outputs);
    t.product.chunk(stack.at(at), from, targets.data() + t.begin, t.first, last);
    if (join == Join::kNone) return;
    t.product.chunk(other.at(at), from, seconds.data() + t.begin, t.first, last);
    for (int64_t r = t.begin; r < t.end; ++r)
      JoinInto(join, limits.begin(), targets[r] + t.first, seconds[r] + t.first, last - t.first);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxwaferExpertMatmul, ExpertMatmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<ffi::Span<const int64_t>>("layout")
                                  .Attr<ffi::Span<const float>>("limits")
                                  .Attr<int64_t>("join")
                                  .Attr<bool>("quantise"));
