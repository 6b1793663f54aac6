// Attention over a paged KV cache on CPU, an XLA FFI handler: an online softmax over the live tokens of each request's
// own blocks, nothing else being read. Grouped-query attention has keys and values of their own; latent attention has
// one row a token, whose first `rank` elements are its value, and gives parts of a softmax.

#include <cmath>
#include <limits>
#include <vector>

#include "lines.h"
#include "parallel.h"
#include "simd.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

constexpr int64_t kTokens = 32;   // most tokens whose scores are held at a time
constexpr int64_t kRows = 16;     // most queries that share a tile of keys
constexpr float kLowest = -std::numeric_limits<float>::infinity();

inline int64_t Padded(int64_t dim) { return (dim + kLanes - 1) / kLanes * kLanes; }

// Tokens of a request, across its blocks: their positions, and their rows among all of a layer's. What lies behind the
// last has a position that no query sees.
struct Tokens {
  int64_t count = 0, row[kTokens];
  int32_t position[kTokens];
};

// One cache field: [blocks, block, heads, dim] of a layer in float32, bfloat16 or e4m3 with an exponent a row.
struct Field {
  const uint8_t* values;
  const int8_t* exponent;
  int64_t blocks, block, heads, dim, width;  // width: bytes of a number

  const uint8_t* at(int64_t row, int64_t head) const { return values + (row * heads + head) * dim * width; }

  // Asks for the cache lines of a head's rows: they lie apart, where the hardware looks for no more.
  void Ask(const Tokens& tokens, int64_t head) const {
    for (int64_t s = 0; s < tokens.count; ++s) AskFor(at(tokens.row[s], head), dim * width);
  }
};

// Rows as float32, padded to whole vectors with zeros, and what each is still to be multiplied by.
struct Tile {
  Lines<float> rows;
  alignas(64) float factor[kTokens] = {};
  int64_t stride;

  explicit Tile(int64_t dim) : stride(Padded(dim)) { rows.resize(kTokens * stride); }

  void Read(const Field& f, const Tokens& tokens, int64_t head, int64_t dim) {
    for (int64_t s = 0; s < tokens.count; ++s) {
      int32_t bits = f.exponent ? (f.exponent[tokens.row[s] * f.heads + head] + 127) << 23 : 0;
      factor[s] = f.exponent ? Load<float>(&bits) * kFp8Unit : 1.0f;
      const uint8_t* from = f.at(tokens.row[s], head);
      float* to = rows.data() + s * stride;
      int64_t d = 0;
      for (; d + kLanes <= dim; d += kLanes) Store(to + d, Widened(from + d * f.width, f.width));
      if (d == dim) continue;
      uint8_t rest[kLanes * 4] = {};
      std::memcpy(rest, from + d * f.width, (dim - d) * f.width);
      Store(to + d, Widened(rest, f.width));
    }
  }

  static Floats Widened(const uint8_t* p, int64_t width) {
    return width == 4 ? Load<Floats>(p) : width == 2 ? FromBf16(Load<Halves>(p)) : FromFp8(p);
  }
};

// A call. Rows are the queries of one request and head: T tokens of G queries.
struct Problem {
  const void* q;
  bool q_is_bf16;
  int64_t batch, tokens, heads, group, dim, value_dim, columns, window;
  const int32_t *start, *count, *table;
  int32_t first;
  Field keys, values;
  bool shared;  // values are the start of keys
  float scale;
  const float* sinks;
  float *out, *highest, *total;

  int64_t rows() const { return tokens * group; }
  int64_t live(int64_t b) const { return count[b] > 0 ? int64_t{start[b]} + count[b] : 0; }
  int64_t place(int64_t b, int64_t h, int64_t row) const {
    return ((b * tokens + row / group) * heads + h) * group + row % group;
  }

  // The tokens of request b from `token`, which moves on, up to `to`. Latent rows may be in another core's blocks, and
  // are left out; other fields read some block, as XLA clamps an index.
  Tokens Take(int64_t b, int64_t& token, int64_t to) const {
    Tokens taken;
    for (; token < to && taken.count < kTokens; ++token) {
      int64_t at = int64_t{table[b * columns + token / keys.block]} - first;
      if (shared && (at < 0 || at >= keys.blocks)) continue;
      taken.row[taken.count] = std::clamp<int64_t>(at, 0, keys.blocks - 1) * keys.block + token % keys.block;
      taken.position[taken.count++] = int32_t(token);
    }
    std::fill(taken.position + taken.count, taken.position + kTokens, std::numeric_limits<int32_t>::max());
    return taken;
  }
};

// The online softmax of up to kRows queries: highest score, Σ exp(score − highest), and the values so weighted.
struct Partial {
  float highest[kRows], total[kRows];
  float* mixed;  // [kRows, value_padded]
};

template <int R, int S>
inline void Scores(const float* q, int64_t q_stride, const float* k, int64_t k_stride, int64_t padded, float* out) {
  Floats sum[R][S] = {};
  for (int64_t d = 0; d < padded; d += kLanes) {
    Floats query[R];
    for (int r = 0; r < R; ++r) query[r] = Load<Floats>(q + r * q_stride + d);
    for (int s = 0; s < S; ++s) {
      Floats key = Load<Floats>(k + s * k_stride + d);
      for (int r = 0; r < R; ++r) sum[r][s] += query[r] * key;
    }
  }
  for (int r = 0; r < R; ++r) {
    if constexpr (S == 4) {
      SumEach(sum[r], out + r * kTokens);
    } else {
      for (int s = 0; s < S; ++s) out[r * kTokens + s] = Sum(sum[r][s]);
    }
  }
}

template <int R>
inline void ScoreRows(const float* q, int64_t padded, const Tile& keys, int64_t count, float* out) {
  int64_t s = 0;
  for (; s + 4 <= count; s += 4) Scores<R, 4>(q, padded, keys.rows.data() + s * keys.stride, keys.stride, padded, out + s);
  for (; s < count; ++s) Scores<R, 1>(q, padded, keys.rows.data() + s * keys.stride, keys.stride, padded, out + s);
}

// mixed ← keep · mixed + Σ weight · value, of R rows and V vectors.
template <int R, int V>
inline void Mix(const float* weight, const float* keep, const Tile& values, int64_t d, int64_t count, float* mixed,
                int64_t padded) {
  Floats sum[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sum[r][v] = Load<Floats>(mixed + r * padded + d + v * kLanes) * keep[r];
  for (int64_t s = 0; s < count; ++s) {
    Floats value[V];
    for (int v = 0; v < V; ++v) value[v] = Load<Floats>(values.rows.data() + s * values.stride + d + v * kLanes);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) sum[r][v] += weight[r * kTokens + s] * value[v];
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) Store(mixed + r * padded + d + v * kLanes, sum[r][v]);
}

template <int R>
inline void MixRows(const float* weight, const float* keep, const Tile& values, int64_t count, float* mixed,
                    int64_t padded) {
  int64_t d = 0;
  for (; d + 4 * kLanes <= padded; d += 4 * kLanes) Mix<R, 4>(weight, keep, values, d, count, mixed, padded);
  for (; d < padded; d += kLanes) Mix<R, 1>(weight, keep, values, d, count, mixed, padded);
}

// The softmax of rows [begin, begin + count) of request b and head h over its tokens from `from` to `to`.
inline void Attend(const Problem& p, int64_t b, int64_t h, int64_t begin, int64_t count, int64_t from, int64_t to,
                   Partial& part) {
  int64_t padded = Padded(p.dim), value_padded = Padded(p.value_dim);
  Lines<float> q;
  q.resize(count * padded);
  int32_t first_seen[kRows], last_seen[kRows];
  for (int64_t r = 0; r < count; ++r) {
    int64_t at = p.place(b, h, begin + r) * p.dim, token = (begin + r) / p.group;
    float* query = q.data() + r * padded;
    std::fill(query + p.dim, query + padded, 0.0f);
    for (int64_t d = 0; d < p.dim; ++d)
      query[d] = p.scale * (p.q_is_bf16 ? Widen(static_cast<const uint16_t*>(p.q)[at + d])
                                    : static_cast<const float*>(p.q)[at + d]);
    last_seen[r] = token < p.count[b] ? int32_t(p.start[b] + token) : -1;
    first_seen[r] = p.window ? std::max<int32_t>(0, last_seen[r] - int32_t(p.window) + 1) : 0;
    if (last_seen[r] < 0) first_seen[r] = std::numeric_limits<int32_t>::max();
    part.highest[r] = kLowest, part.total[r] = 0;
  }
  std::fill_n(part.mixed, count * value_padded, 0.0f);
  to = std::min<int64_t>(to, *std::max_element(last_seen, last_seen + count) + 1);
  from = std::max<int64_t>(from, *std::min_element(first_seen, first_seen + count));
  Tile tile(p.dim);  // of keys, and then of values
  alignas(64) float score[kRows * kTokens], keep[kRows];
  Tokens tokens = p.Take(b, from, to), next;
  for (; tokens.count; tokens = next) {
    next = p.Take(b, from, to);
    p.keys.Ask(next, h);
    if (!p.shared) p.values.Ask(next, h);
    tile.Read(p.keys, tokens, h, p.dim);
    for (int64_t r = 0; r < count; r += 3) {
      float* to_scores = score + r * kTokens;
      const float* queries = q.data() + r * padded;
      if (count - r >= 3)
        ScoreRows<3>(queries, padded, tile, tokens.count, to_scores);
      else if (count - r == 2)
        ScoreRows<2>(queries, padded, tile, tokens.count, to_scores);
      else
        ScoreRows<1>(queries, padded, tile, tokens.count, to_scores);
    }
    for (int64_t r = 0; r < count; ++r) {
      float* own = score + r * kTokens;
      Floats most = Splat(part.highest[r]), sum{};
      for (int64_t s = 0; s < kTokens; s += kLanes) {
        Ints position = Load<Ints>(tokens.position + s);
        Floats value = Load<Floats>(own + s) * Load<Floats>(tile.factor + s);
        value = (position >= first_seen[r]) & (position <= last_seen[r]) ? value : Splat(kLowest);
        Store(own + s, value);
        most = Max(value, most);
      }
      float top = Most(most);
      // While a row has seen nothing its maximum is −inf, and −inf − −inf is not a number.
      float base = std::isinf(top) ? 0 : top;
      keep[r] = part.highest[r] == kLowest ? 0.0f : std::exp(part.highest[r] - base);
      for (int64_t s = 0; s < kTokens; s += kLanes) {
        Floats weight = Exp(Load<Floats>(own + s) - base);
        sum += weight;
        Store(own + s, weight);
      }
      part.total[r] = keep[r] * part.total[r] + Sum(sum);
      part.highest[r] = top;
    }
    if (!p.shared) tile.Read(p.values, tokens, h, p.value_dim);
    if (p.keys.exponent)
      for (int64_t s = 0; s < count * kTokens; s += kLanes)
        Store(score + s, Load<Floats>(score + s) * Load<Floats>(tile.factor + s % kTokens));
    for (int64_t r = 0; r < count; r += 3) {
      float* mixed = part.mixed + r * value_padded;
      if (count - r >= 3)
        MixRows<3>(score + r * kTokens, keep + r, tile, tokens.count, mixed, value_padded);
      else if (count - r == 2)
        MixRows<2>(score + r * kTokens, keep + r, tile, tokens.count, mixed, value_padded);
      else
        MixRows<1>(score + r * kTokens, keep + r, tile, tokens.count, mixed, value_padded);
    }
  }
}

// Joins the parts of `count` rows from `begin`, of which every `stride`-th is theirs, and writes their results.
inline void Finish(const Problem& p, int64_t b, int64_t h, int64_t begin, int64_t count, const Partial* parts,
                   int64_t splits, int64_t stride) {
  int64_t value_padded = Padded(p.value_dim);
  for (int64_t r = 0; r < count; ++r) {
    int64_t place = p.place(b, h, begin + r);
    float top = kLowest, total = 0;
    for (int64_t i = 0; i < splits; ++i) top = std::max(top, parts[i * stride].highest[r]);
    float sink = p.sinks && top != kLowest ? p.sinks[h * p.group + (begin + r) % p.group] : kLowest;
    float base = std::max(top, sink);
    float* out = p.out + place * p.value_dim;
    std::fill(out, out + p.value_dim, 0.0f);
    for (int64_t i = 0; i < splits; ++i) {
      if (parts[i * stride].highest[r] == kLowest && !(parts[i * stride].total[r] != 0)) continue;
      float weight = splits == 1 && sink == kLowest ? 1.0f : std::exp(parts[i * stride].highest[r] - base);
      total += weight * parts[i * stride].total[r];
      const float* mixed = parts[i * stride].mixed + r * value_padded;
      for (int64_t d = 0; d < p.value_dim; ++d) out[d] += weight * mixed[d];
    }
    if (p.highest) {
      p.highest[place] = top, p.total[place] = total;
      continue;
    }
    if (sink != kLowest) total += std::exp(sink - base);
    if (total != 0)
      for (int64_t d = 0; d < p.value_dim; ++d) out[d] /= total;
  }
}

// Tokens of a task of a decode step: few, so that all heads of them stay in a cache, but where many queries share a row,
// as their partial results would take more than the rows. It does not depend on the batch, so results do not.
inline int64_t SplitOf(const Problem& p) { return p.group > kRows ? 512 : 64; }

template <class Pool>
void Run(Pool& pool, const Problem& p) {
  // A decode step goes through a request's tokens in splits, all heads of a split one after another: their rows lie
  // beside one another. A chunk of a prompt has work enough in each head and tile of rows.
  struct Group {
    int64_t b, row, live, splits, first;  // first: of its parts, [splits, heads], where there are several splits
  };
  struct Task {
    const Group* group;
    int64_t split, head, heads;
  };
  std::vector<Group> groups;
  int64_t count = 0, length = SplitOf(p);
  for (int64_t b = 0; b < p.batch; ++b) {
    int64_t live = std::min(p.live(b), p.columns * p.keys.block);
    int64_t splits = p.tokens == 1 ? std::max<int64_t>(1, (live + length - 1) / length) : 1;
    for (int64_t row = 0; row < p.rows(); row += kRows) {
      groups.push_back({b, row, live, splits, count});
      if (splits > 1) count += splits * p.heads;
    }
  }
  std::vector<Task> tasks, joins;
  for (const Group& g : groups) {
    int64_t heads = p.tokens == 1 ? p.heads : 1;
    for (int64_t split = 0; split < g.splits; ++split)
      for (int64_t head = 0; head < p.heads; head += heads) tasks.push_back({&g, split, head, heads});
    if (g.splits > 1)
      for (int64_t head = 0; head < p.heads; ++head) joins.push_back({&g, 0, head, 1});
  }
  int64_t size = std::min(kRows, p.rows()) * Padded(p.value_dim);
  Lines<float> mixed;
  mixed.resize(count * size);
  std::vector<Partial> parts(count);
  for (int64_t i = 0; i < count; ++i) parts[i].mixed = mixed.data() + i * size;
  auto rows = [&](const Group& g) { return std::min(kRows, p.rows() - g.row); };
  Parallel(pool, int64_t(tasks.size()), [&](int64_t i) {
    const Task& t = tasks[i];
    const Group& g = *t.group;
    for (int64_t h = t.head; h < t.head + t.heads; ++h) {
      if (g.splits > 1) {
        int64_t from = t.split * length;
        Attend(p, g.b, h, g.row, rows(g), from, std::min(from + length, g.live), parts[g.first + t.split * p.heads + h]);
        continue;
      }
      Lines<float> own;
      own.resize(size);
      Partial whole;
      whole.mixed = own.data();
      Attend(p, g.b, h, g.row, rows(g), 0, g.live, whole);
      Finish(p, g.b, h, g.row, rows(g), &whole, 1, 1);
    }
  });
  Parallel(pool, int64_t(joins.size()), [&](int64_t i) {
    const Group& g = *joins[i].group;
    int64_t h = joins[i].head;
    Finish(p, g.b, h, g.row, rows(g), parts.data() + g.first + h, g.splits, p.heads);
  });
}

ffi::ErrorOr<Field> ReadField(ffi::RemainingArgs args, size_t& at, bool scaled, int64_t layer) {
  auto values = args.get<ffi::AnyBuffer>(at++);
  if (!values) return ffi::Unexpected(values.error());
  auto shape = values->dimensions();
  if (shape.size() != 5 || shape[0] < 1)
    return ffi::Unexpected(ffi::Error::InvalidArgument("attention takes pages [layers, blocks, block, heads, dim]"));
  layer = std::clamp<int64_t>(layer, 0, shape[0] - 1);
  Field f{};
  f.blocks = shape[1], f.block = shape[2], f.heads = shape[3], f.dim = shape[4];
  f.width = int64_t(ffi::ByteWidth(values->element_type()));
  int64_t rows = layer * f.blocks * f.block * f.heads;
  f.values = static_cast<const uint8_t*>(values->untyped_data()) + rows * f.dim * f.width;
  if ((f.width == 1) != scaled) return ffi::Unexpected(ffi::Error::InvalidArgument("pages of an unknown type"));
  if (scaled) {
    auto exponent = args.get<ffi::Buffer<ffi::S8>>(at++);
    if (!exponent) return ffi::Unexpected(exponent.error());
    f.exponent = exponent->typed_data() + rows;
  }
  return f;
}

ffi::Error Attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::S32> start,
                     ffi::Buffer<ffi::S32> count, ffi::Buffer<ffi::S32> table, ffi::Buffer<ffi::S32> first,
                     ffi::RemainingArgs rest, ffi::RemainingRets outs, float scale, int64_t window, int64_t rank,
                     bool scaled, bool sunk) {
  auto shape = q.dimensions();
  Problem p{};
  p.shared = rank > 0;
  if (shape.size() != (p.shared ? 4 : 5)) return ffi::Error::InvalidArgument("attention's queries have a wrong shape");
  p.q = q.untyped_data(), p.q_is_bf16 = q.element_type() == ffi::DataType::BF16;
  p.batch = shape[0], p.tokens = shape[1], p.heads = p.shared ? 1 : shape[2], p.group = shape[shape.size() - 2];
  p.dim = shape.back(), p.value_dim = p.shared ? rank : p.dim, p.columns = table.dimensions()[1], p.window = window;
  p.start = start.typed_data(), p.count = count.typed_data(), p.table = table.typed_data();
  p.first = *first.typed_data(), p.scale = scale;
  size_t at = 0;
  auto keys = ReadField(rest, at, scaled, *layer.typed_data());
  if (!keys) return keys.error();
  p.keys = *keys;
  if (!p.shared) {
    auto values = ReadField(rest, at, scaled, *layer.typed_data());
    if (!values) return values.error();
    p.values = *values;
  }
  if (p.keys.dim != p.dim || p.keys.heads != p.heads || p.keys.blocks < 1 ||
      (!p.shared && (p.values.dim != p.dim || p.values.blocks != p.keys.blocks)))
    return ffi::Error::InvalidArgument("attention's queries and pages do not fit together");
  if (sunk) {
    auto sinks = rest.get<ffi::Buffer<ffi::F32>>(at);
    if (!sinks) return sinks.error();
    p.sinks = sinks->typed_data();
  }
  float* results[3] = {};
  for (size_t i = 0; i < std::min<size_t>(outs.size(), 3); ++i) {
    auto out = outs.get<ffi::Buffer<ffi::F32>>(i);
    if (!out) return out.error();
    results[i] = (*out)->typed_data();
  }
  p.out = results[outs.size() - 1];
  if (p.shared) p.highest = results[0], p.total = results[1];
  if (p.batch && p.rows() && p.heads) Run(pool, p);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxwaferAttention, Attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("rank")
                                  .Attr<bool>("scaled")
                                  .Attr<bool>("sunk"));
