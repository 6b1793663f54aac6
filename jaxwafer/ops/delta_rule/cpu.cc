// One step of the gated delta rule on CPU, an XLA FFI handler that updates the state of requests where it lies: an
// argument aliased with a result. Each head's state [K, V] is taken in columns of values that stay in the first-level
// cache, so that it is read from memory once and written once.

#include <algorithm>
#include <vector>

#include "parallel.h"
#include "simd.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

constexpr int64_t kColumns = 4 * kLanes;

// One head: key, query and decay [K], value and output [V], state [K, V], which counts as zero if `fresh`.
struct Head {
  const float *query, *key, *value, *decay;
  float beta;
  float *state, *out;
  int64_t keys, values;
  bool fresh;
};

inline void StoreUpTo(float* p, Floats v, int64_t count) {
  if (count >= kLanes) return Store(p, v);
  float lanes[kLanes];
  Store(lanes, v);
  std::memcpy(p, lanes, count * 4);
}

// With a = exp g: u = β (v − Σ_k key·a·S), S ← a·S + key ⊗ u, o = Σ_k query·a·S + (query · key) u.
template <int V>
inline void Columns(const Head& h, int64_t first, float overlap) {
  auto left = [&](int v) { return h.values - first - v * kLanes; };
  Floats seen[V] = {}, asked[V] = {};
  if (!h.fresh)
    for (int64_t k = 0; k < h.keys; ++k)
      for (int v = 0; v < V; ++v) {
        Floats s = h.decay[k] * LoadUpTo<Floats>(h.state + k * h.values + first + v * kLanes, left(v));
        seen[v] += h.key[k] * s, asked[v] += h.query[k] * s;
      }
  Floats update[V];
  for (int v = 0; v < V; ++v) {
    update[v] = h.beta * (LoadUpTo<Floats>(h.value + first + v * kLanes, left(v)) - seen[v]);
    StoreUpTo(h.out + first + v * kLanes, asked[v] + overlap * update[v], left(v));
  }
  for (int64_t k = 0; k < h.keys; ++k)
    for (int v = 0; v < V; ++v) {
      float* at = h.state + k * h.values + first + v * kLanes;
      Floats s = h.fresh ? Floats{} : h.decay[k] * LoadUpTo<Floats>(at, left(v));
      StoreUpTo(at, s + h.key[k] * update[v], left(v));
    }
}

inline void Step(const Head& h) {
  float overlap = 0;
  for (int64_t k = 0; k < h.keys; ++k) overlap += h.query[k] * h.key[k];
  int64_t first = 0;
  for (; first + kColumns <= h.values; first += kColumns) Columns<4>(h, first, overlap);
  for (; first < h.values; first += kLanes) Columns<1>(h, first, overlap);
}

ffi::Error DeltaStep(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k, ffi::Buffer<ffi::F32> v,
                     ffi::Buffer<ffi::F32> g, ffi::Buffer<ffi::F32> beta, ffi::Buffer<ffi::S32> layer,
                     ffi::Buffer<ffi::S32> slot, ffi::Buffer<ffi::S32> start, ffi::Buffer<ffi::F32> state,
                     ffi::Result<ffi::Buffer<ffi::F32>> out, ffi::Result<ffi::Buffer<ffi::F32>> updated) {
  auto shape = state.dimensions();
  if (shape.size() != 5 || q.dimensions().size() != 3 || shape[0] < 1)
    return ffi::Error::InvalidArgument("delta_rule takes q [B, H, K] and state [layers, rows, H, K, V]");
  int64_t batch = q.dimensions()[0], heads = shape[2], keys = shape[3], values = shape[4];
  int64_t decays = g.dimensions()[2];
  if (q.dimensions()[1] != heads || q.dimensions()[2] != keys || v.dimensions()[2] != values ||
      k.element_count() != q.element_count() || (decays != 1 && decays != keys) ||
      int64_t(slot.element_count()) != batch)
    return ffi::Error::InvalidArgument("delta_rule's inputs and state do not fit together");
  // XLA copied the state if it could not let the two share it.
  if (updated->typed_data() != state.typed_data())
    std::copy_n(state.typed_data(), state.element_count(), updated->typed_data());
  int64_t at = std::clamp<int64_t>(*layer.typed_data(), 0, shape[0] - 1);
  Parallel(pool, batch * heads, [&](int64_t i) {
    int64_t b = i / heads, head = i % heads, row = slot.typed_data()[b];
    if (row < 0 || row >= shape[1]) {
      std::fill_n(out->typed_data() + i * values, values, 0.0f);
      return;
    }
    std::vector<float> decay(keys + kLanes);
    if (decays == 1) {
      Floats one = Exp(Splat(g.typed_data()[i]));
      std::fill_n(decay.data(), keys, one[0]);
    } else {
      for (int64_t c = 0; c < keys; c += kLanes)
        Store(decay.data() + c, Exp(LoadUpTo<Floats>(g.typed_data() + i * keys + c, keys - c)));
    }
    float* own = updated->typed_data() + ((at * shape[1] + row) * heads + head) * keys * values;
    Step({q.typed_data() + i * keys, k.typed_data() + i * keys, v.typed_data() + i * values, decay.data(),
          beta.typed_data()[i], own, out->typed_data() + i * values, keys, values, start.typed_data()[b] == 0});
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxwaferDeltaStep, DeltaStep,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
