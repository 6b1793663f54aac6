// A token of each request through a linear mixer on CPU, from its projections to what its output matrix takes: an XLA
// FFI handler that updates the cache of requests where it lies, in arguments aliased with results. Each head's state
// [K, V] is taken in columns of values that stay in the first-level cache, so that it is read from memory once and
// written once.

#include <algorithm>
#include <cmath>
#include <vector>

#include "activation.h"
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

// f(first, left) for every vector of `count` elements: of the last one may be left fewer than it has.
template <class F>
inline void ByVectors(int64_t count, const F& f) {
  for (int64_t i = 0; i < count; i += kLanes) f(i, count - i);
}

// Σ_tap weight[c, tap] · inputs[tap][c] for every channel c. Where the number of taps is known (kTaps), the compiler
// takes the weights of a vector of channels apart by permuting.
template <int kTaps, class T>
inline void Weighted(int taps, const T* const* inputs, const float* __restrict weight, int64_t channels,
                     float* __restrict out) {
  if (kTaps) taps = kTaps;
  for (int64_t c = 0; c < channels; ++c) {
    float sum = 0;
    for (int tap = 0; tap < taps; ++tap) sum += weight[c * taps + tap] * Widen(inputs[tap][c]);
    out[c] = sum;
  }
}

// SiLU of the causal convolution of x [channels], rounded to the numbers T that the inputs before it, [taps − 1] rows
// of `stride`, are kept in; x is then the last of them. They count as zeros if `fresh`. weight: [channels, taps].
template <class T>
inline void Convolve(const float* x, const float* weight, T* past, int64_t stride, int taps, bool fresh,
                     int64_t channels, float* out) {
  std::vector<T> now(channels);
  for (int64_t c = 0; c < channels; ++c) Narrow(x[c], now[c]);
  std::vector<const T*> inputs(taps);
  for (int tap = 0; tap < taps; ++tap) {
    bool last = tap + 1 == taps;
    if (fresh && !last) std::fill_n(past + tap * stride, channels, T{});
    inputs[tap] = last ? now.data() : past + tap * stride;
  }
  // All published models have four taps.
  (taps == 4 ? Weighted<4, T> : Weighted<0, T>)(taps, inputs.data(), weight, channels, out);
  for (int tap = 0; tap + 1 < taps; ++tap) std::copy_n(inputs[tap + 1], channels, past + tap * stride);
  ByVectors(channels, [&](int64_t i, int64_t left) {
    Floats y = LoadUpTo<Floats>(out + i, left);
    StoreUpTo(out + i, y * Sigmoid(y), left);
  });
}

// x / √(Σ x² + 1e-6) · scale.
inline void MakeUnit(float* x, int64_t count, float scale) {
  Floats squares{};
  ByVectors(count, [&](int64_t i, int64_t left) {
    Floats v = LoadUpTo<Floats>(x + i, left);
    squares += v * v;
  });
  scale /= std::sqrt(Sum(squares) + 1e-6f);
  ByVectors(count, [&](int64_t i, int64_t left) { StoreUpTo(x + i, scale * LoadUpTo<Floats>(x + i, left), left); });
}

// exp g of z, `bound`·σ(rate·z) or, where that is no number, −rate·softplus(z).
inline Floats Decay(Floats z, float rate, float bound) {
  return Exp(bound == bound ? bound * Sigmoid(rate * z) : -rate * Softplus(z));
}

// RMSNorm of out ⊙ weight ⊙ the gate's activation.
inline void Finish(float* out, const float* gate, const float* weight, int64_t values, float eps, bool silu) {
  Floats squares{};
  ByVectors(values, [&](int64_t i, int64_t left) {
    Floats v = LoadUpTo<Floats>(out + i, left);
    squares += v * v;
  });
  float scale = 1 / std::sqrt(Sum(squares) / values + eps);
  ByVectors(values, [&](int64_t i, int64_t left) {
    Floats g = LoadUpTo<Floats>(gate + i, left), act = Sigmoid(g);
    if (silu) act *= g;
    StoreUpTo(out + i, scale * LoadUpTo<Floats>(out + i, left) * LoadUpTo<Floats>(weight + i, left) * act, left);
  });
}

// Sizes: `groups` of heads that share keys and queries, [keys] each; `decays` is 1 or `keys`.
struct Sizes {
  int64_t batch, heads, groups, keys, values, decays, rows;
  int taps;
};

// A convolution's inputs, weights of a layer and past inputs of all requests.
template <class T>
struct Channels {
  const float *x, *weight;
  T* past;
};

struct Rest {
  const float *z, *beta, *gate, *bias, *rate, *norm;
  const int32_t *slot, *start;
  float *state, *out, eps, bound;
  bool silu;
};

// The heads of a group of a request.
template <class T>
void Group(const Sizes& n, const Channels<T>& q, const Channels<T>& k, const Channels<T>& v, const Rest& r, int64_t b,
           int64_t group) {
  int64_t each = n.heads / n.groups, row = r.slot[b], first = group * each;
  float* out = r.out + (b * n.heads + first) * n.values;
  if (row < 0 || row >= n.rows) return void(std::fill_n(out, each * n.values, 0.0f));
  bool fresh = r.start[b] == 0;
  std::vector<float> query(n.keys), key(n.keys), value(each * n.values), decay(n.keys);
  auto convolve = [&](const Channels<T>& c, std::vector<float>& into) {
    int64_t size = into.size(), all = size * n.groups, at = group * size;
    Convolve(c.x + b * all + at, c.weight + at * n.taps, c.past + row * (n.taps - 1) * all + at, all, n.taps, fresh,
             size, into.data());
  };
  convolve(q, query), convolve(k, key), convolve(v, value);
  MakeUnit(query.data(), n.keys, 1 / std::sqrt(float(n.keys))), MakeUnit(key.data(), n.keys, 1);
  for (int64_t h = 0; h < each; ++h, out += n.values) {
    int64_t head = first + h, at = b * n.heads + head;
    const float *z = r.z + at * n.decays, *bias = r.bias + head * n.decays;
    float rate = std::exp(r.rate[head]);
    ByVectors(n.decays, [&](int64_t i, int64_t left) {
      Floats sum = LoadUpTo<Floats>(z + i, left) + LoadUpTo<Floats>(bias + i, left);
      StoreUpTo(decay.data() + i, Decay(sum, rate, r.bound), left);
    });
    if (n.decays == 1) std::fill(decay.begin(), decay.end(), decay[0]);
    float* state = r.state + (row * n.heads + head) * n.keys * n.values;
    float beta = Sigmoid(Splat(r.beta[at]))[0];
    const float* own = value.data() + h * n.values;
    Step({query.data(), key.data(), own, decay.data(), beta, state, out, n.keys, n.values, fresh});
    Finish(out, r.gate + at * n.values, r.norm, n.values, r.eps, r.silu);
  }
}

using F32 = ffi::Buffer<ffi::F32>;
using S32 = ffi::Buffer<ffi::S32>;

ffi::Error LinearAttention(ffi::ThreadPool pool, F32 q, F32 k, F32 v, F32 z, F32 beta, F32 gate, F32 q_conv, F32 k_conv,
                           F32 v_conv, F32 bias, F32 rate, F32 norm, S32 index, S32 layer, S32 slot, S32 start,
                           F32 state, ffi::AnyBuffer q_past, ffi::AnyBuffer k_past, ffi::AnyBuffer v_past,
                           ffi::Result<F32> out, ffi::Result<F32> new_state, ffi::Result<ffi::AnyBuffer> new_q,
                           ffi::Result<ffi::AnyBuffer> new_k, ffi::Result<ffi::AnyBuffer> new_v, float eps, bool silu,
                           float bound) {
  auto shape = state.dimensions();
  auto flat = [](const F32& x) { return x.dimensions().size() == 2; };
  bool ranks = shape.size() == 5 && q_past.dimensions().size() == 4;
  for (const F32* x : {&q, &k, &v, &z, &beta, &gate, &q_conv, &k_conv, &v_conv, &bias, &rate, &norm}) ranks &= flat(*x);
  if (!ranks || shape[0] < 1 || shape[2] < 1 || shape[3] < 1)
    return ffi::Error::InvalidArgument("linear_attention takes state [layers, rows, H, K, V] and rows");
  Sizes n{};
  n.batch = beta.dimensions()[0], n.rows = shape[1], n.heads = shape[2], n.keys = shape[3], n.values = shape[4];
  n.groups = q.dimensions()[1] / n.keys, n.decays = z.dimensions()[1] / n.heads;
  n.taps = int(q_past.dimensions()[2]) + 1;
  int64_t queries = n.groups * n.keys, values = n.heads * n.values;
  auto fits = [&](const ffi::AnyBuffer& past, int64_t channels, const F32& x, const F32& weight) {
    auto p = past.dimensions();
    return p.size() == 4 && p[0] == shape[0] && p[1] == n.rows && p[2] == n.taps - 1 && p[3] == channels &&
           x.dimensions()[1] == channels && weight.dimensions()[1] == channels * n.taps &&
           past.element_type() == q_past.element_type();
  };
  if (n.groups < 1 || n.heads % n.groups || (n.decays != 1 && n.decays != n.keys) ||
      z.dimensions()[1] != n.heads * n.decays || !fits(q_past, queries, q, q_conv) ||
      !fits(k_past, queries, k, k_conv) || !fits(v_past, values, v, v_conv) || gate.dimensions()[1] != values ||
      bias.dimensions()[1] != n.heads * n.decays || rate.dimensions()[1] != n.heads || norm.dimensions()[1] != n.values ||
      int64_t(slot.element_count()) != n.batch || int64_t(start.element_count()) != n.batch)
    return ffi::Error::InvalidArgument("linear_attention's inputs and cache do not fit together");
  auto own = [](const F32& stack, const S32& at) {
    auto d = stack.dimensions();
    return stack.typed_data() + std::clamp<int64_t>(*at.typed_data(), 0, d[0] - 1) * d[1];
  };
  int64_t here = std::clamp<int64_t>(*layer.typed_data(), 0, shape[0] - 1);
  // XLA copied what it could not let share.
  auto mine = [&](const auto& from, auto& to) {
    if (to.untyped_data() != from.untyped_data())
      std::memcpy(to.untyped_data(), from.untyped_data(), from.size_bytes());
    return static_cast<uint8_t*>(to.untyped_data()) + here * int64_t(from.size_bytes() / shape[0]);
  };
  Rest rest{z.typed_data(), beta.typed_data(), gate.typed_data(), own(bias, index), own(rate, index), own(norm, index),
            slot.typed_data(), start.typed_data(), reinterpret_cast<float*>(mine(state, *new_state)),
            out->typed_data(), eps, bound, silu};
  uint8_t* past[] = {mine(q_past, *new_q), mine(k_past, *new_k), mine(v_past, *new_v)};
  const float* weights[] = {own(q_conv, index), own(k_conv, index), own(v_conv, index)};
  auto run = [&](auto* number) {
    using T = std::remove_pointer_t<decltype(number)>;
    auto channels = [&](int i, const F32& x) {
      return Channels<T>{x.typed_data(), weights[i], reinterpret_cast<T*>(past[i])};
    };
    Channels<T> qs = channels(0, q), ks = channels(1, k), vs = channels(2, v);
    Parallel(pool, n.batch * n.groups, [&](int64_t i) { Group(n, qs, ks, vs, rest, i / n.groups, i % n.groups); });
    return ffi::Error::Success();
  };
  switch (q_past.element_type()) {
    case ffi::DataType::F32:
      return run(static_cast<float*>(nullptr));
    case ffi::DataType::U16:
      return run(static_cast<uint16_t*>(nullptr));
    default:
      return ffi::Error::InvalidArgument("linear_attention keeps past inputs in float32 or bfloat16");
  }
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxwaferLinearAttention, LinearAttention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()  // q, k, v, z, beta, gate
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()  // vectors of all layers
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<S32>()  // index, layer, slot, start
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .Arg<F32>()  // state, past inputs
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<F32>()
                                  .Ret<F32>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("eps")
                                  .Attr<bool>("silu")
                                  .Attr<float>("bound"));
