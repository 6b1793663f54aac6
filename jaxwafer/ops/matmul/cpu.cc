// Quantised matmul on CPU, an XLA FFI handler: out[M, N] = x[M, K] · W[index]ᵀ with W a stack [S, N, K] in the storage
// layout of quant/formats.py. Weights are widened to float32 and accumulated in float32; activations are not quantised.
//
// Both operands run along K, so a dot product may take K in any order: a format names the order in which it unpacks
// fastest, and x is rearranged to it once per call. Few rows of x: unpack in registers and multiply at once (Dot),
// which is bound by reading the weights. Many rows: write out tiles of weights and multiply those (Tile).

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>

#include "cpu_formats.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

constexpr int kDotRows = 4;                             // most rows of x that share one unpacking in Dot
constexpr int64_t kDotLimit = 16;                       // most rows of x for Dot
constexpr int64_t kDotOutputs = 16, kDotBlocks = 32;    // tile of weights in Dot
constexpr int64_t kChunkBytes = 32768;                  // of weights, the unit of work in Dot
constexpr int kTileRows = kLanes == 16 ? 6 : 3;         // register tile: 12 of 16 registers add up, or 24 of 32
constexpr int kTileOutputs = 4;
constexpr int64_t kGemmOutputs = 32, kGemmBlocks = 32;  // tile of written-out weights: 128 KiB
constexpr int64_t kGemmRows = 48;                       // of x, that meet it before the next

// One call. x holds `blocks` blocks a row, in the format's order, zero beyond the given K; in Dot each block is
// followed by a vector of its sums over vectors where the format has an offset or a minimum.
struct Problem {
  const uint8_t *values, *scale, *minimum;
  const float* x;
  float* out;
  int64_t rows, outputs, inputs, blocks, row_bytes, x_stride;
};

template <class F>
constexpr bool kSums = F::kMinimum || F::kOffset != 0;

// The weights of block b, or, where the row ends within it, a copy filled up with zeros.
template <class F>
inline const uint8_t* Block(const Problem& p, const uint8_t* row, int64_t b, uint8_t* spare) {
  int64_t left = p.row_bytes - b * F::kBytes;
  if (F::kGrouped || left >= F::kBytes) return row + b * F::kBytes;
  std::memset(spare, 0, F::kBytes);
  std::memcpy(spare, row + b * F::kBytes, left);
  return spare;
}

// float32 of up to kLanes float16 scales.
inline void Scales(const uint8_t* p, int64_t count, float* out) {
  Halves h{};
  if (count >= kLanes) {
    h = Load<Halves>(p);
  } else {
    std::memcpy(&h, p, count * 2);
  }
  Floats wide = FromHalf(h);
  std::memcpy(out, &wide, sizeof wide);
}

template <class F>
inline float RowScale(const Problem& p, int64_t n) {
  return p.scale ? Load<float>(p.scale + n * 4) * F::kUnit : F::kUnit;
}

// Calls f with the integral constant of count, 1 to Most.
template <int Most, class Function>
inline void Unrolled(int64_t count, const Function& f) {
  if constexpr (Most > 1) {
    if (count < Most) return Unrolled<Most - 1>(count, f);
  }
  f(std::integral_constant<int, Most>{});
}

// Adds blocks [begin, end) of output n, R rows of x from m, to `sums` [rows of x].
template <class F, int R>
inline void Dot(const Problem& p, int64_t n, int64_t m, int64_t begin, int64_t end, Floats* sums) {
  constexpr int kPitch = kBlock + (kSums<F> ? kLanes : 0), kChains = R == 1 ? 4 : 2;
  const uint8_t* weights = p.values + n * p.row_bytes;
  const float* x = p.x + m * p.x_stride;
  Floats sum[R][kChains];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < kChains; ++c) sum[r][c] = c == 0 ? sums[m + r] : Floats{};
  if constexpr (F::kGrouped) {
    float scale[kLanes], minimum[kLanes];
    auto add = [&](int64_t b, int i, int chain) {
      Floats w[kVectors];
      F::Unpack(weights + b * F::kBytes, w);
      for (int r = 0; r < R; ++r) {
        const float* block = x + r * p.x_stride + b * kPitch;
        Floats group = F::kOffset != 0 ? Load<Floats>(block + kBlock) : Floats{};
        for (int v = 0; v < kVectors; ++v) group += w[v] * Load<Floats>(block + v * kLanes);
        sum[r][chain] += group * scale[i];
        if (F::kMinimum) sum[r][kChains - 1 - chain] += minimum[i] * Load<Floats>(block + kBlock);
      }
    };
    for (int64_t first = begin; first < end; first += kLanes) {
      int count = int(std::min<int64_t>(kLanes, end - first)), i = 0;
      int64_t offset = (n * p.blocks + first) * 2;
      Scales(p.scale + offset, count, scale);
      if (F::kMinimum) Scales(p.minimum + offset, count, minimum);
      for (; i + 2 <= count; i += 2) {
        add(first + i, i, 0);
        add(first + i + 1, i + 1, 1);
      }
      if (i < count) add(first + i, i, 0);
    }
  } else {
    auto add = [&](const uint8_t* bytes, int64_t b) {
      Floats w[kVectors];
      F::Unpack(bytes, w);
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < kVectors; ++v)
          sum[r][v % kChains] += w[v] * Load<Floats>(x + r * p.x_stride + b * kPitch + v * kLanes);
    };
    int64_t whole = std::min(p.row_bytes / F::kBytes, end);
    for (int64_t b = begin; b < whole; ++b) add(weights + b * F::kBytes, b);
    uint8_t spare[F::kBytes];
    if (whole < end) add(Block<F>(p, weights, whole, spare), whole);
  }
  for (int r = 0; r < R; ++r) {
    Floats total = sum[r][0] + sum[r][1];
    for (int c = 2; c < kChains; ++c) total += sum[r][c];
    sums[m + r] = total;
  }
}

template <class F>
void DotChunk(const Problem& p, int64_t begin, int64_t end) {
  Floats sums[kDotOutputs * kDotLimit];
  // Several rows of x are taken in pieces that stay in the first-level cache.
  int64_t piece = p.rows == 1 ? p.blocks : kDotBlocks;
  for (; begin < end; begin += kDotOutputs) {
    int64_t outputs = std::min(kDotOutputs, end - begin);
    std::fill_n(sums, outputs * p.rows, Floats{});
    for (int64_t b = 0; b < p.blocks; b += piece) {
      int64_t stop = std::min(b + piece, p.blocks);
      for (int64_t m = 0; m < p.rows; m += kDotRows)
        Unrolled<kDotRows>(p.rows - m, [&](auto rows) {
          for (int64_t n = 0; n < outputs; ++n) Dot<F, rows.value>(p, begin + n, m, b, stop, sums + n * p.rows);
        });
    }
    for (int64_t n = 0; n < outputs; ++n)
      for (int64_t m = 0; m < p.rows; ++m)
        p.out[m * p.outputs + begin + n] = Sum(sums[n * p.rows + m]) * (F::kGrouped ? 1 : RowScale<F>(p, begin + n));
  }
}

// Writes the weights of output n, blocks [b, b + count), in the format's order.
template <class F>
void WriteOut(const Problem& p, int64_t n, int64_t b, int64_t count, float* out) {
  const uint8_t* row = p.values + n * p.row_bytes;
  alignas(64) uint8_t spare[128];
  alignas(64) float unit[kBlock];
  if constexpr (F::kOrdered)
    for (int i = 0; i < kBlock; ++i) unit[i] = F::UnitOf(i);
  float scale[kLanes] = {}, minimum[kLanes] = {};
  for (int64_t i = 0; i < count; ++i, out += kBlock) {
    int64_t slot = F::kGrouped ? i % kLanes : 0;
    if constexpr (F::kGrouped) {
      int64_t offset = (n * p.blocks + b + i) * 2;
      if (slot == 0) Scales(p.scale + offset, count - i, scale);
      if (slot == 0 && F::kMinimum) Scales(p.minimum + offset, count - i, minimum);
    } else {
      scale[0] = RowScale<F>(p, n);
    }
    Floats w[kVectors];
    F::Unpack(Block<F>(p, row, b + i, spare), w);
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (F::kOffset != 0) w[v] -= F::kOffset * Load<Floats>(unit + v * kLanes);
      w[v] *= scale[slot];
      if constexpr (F::kMinimum) w[v] += minimum[slot] * Load<Floats>(unit + v * kLanes);
      std::memcpy(out + v * kLanes, &w[v], sizeof w[v]);
    }
  }
}

// Adds (or, for the first inputs, writes) R rows of x times kTileOutputs rows of w, `size` inputs of both.
template <int R>
inline void Tile(const float* x, int64_t x_stride, const float* w, int64_t w_stride, int64_t size, bool add, float* out,
                 int64_t out_stride, int64_t outputs) {
  Floats sum[R][kTileOutputs];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < kTileOutputs; ++n) sum[r][n] = Floats{};
  for (int64_t k = 0; k < size; k += kLanes) {
    Floats value[R];
    for (int r = 0; r < R; ++r) value[r] = Keep(Load<Floats>(x + r * x_stride + k));
    for (int n = 0; n < kTileOutputs; ++n) {
      Floats weight = Keep(Load<Floats>(w + n * w_stride + k));
      for (int r = 0; r < R; ++r) sum[r][n] += value[r] * weight;
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < kTileOutputs; ++n)
      if (n < outputs) out[r * out_stride + n] = Sum(sum[r][n]) + (add ? out[r * out_stride + n] : 0.0f);
}

template <class F>
void GemmChunk(const Problem& p, int64_t begin, int64_t end) {
  constexpr int64_t kPitch = kGemmBlocks * kBlock + 16;  // rows a power of two apart would share cache sets
  alignas(64) float tile[kGemmOutputs * kPitch];
  for (int64_t b = 0; b < p.blocks; b += kGemmBlocks) {
    int64_t count = std::min(kGemmBlocks, p.blocks - b);
    for (int64_t n = begin; n < end; ++n) WriteOut<F>(p, n, b, count, tile + (n - begin) * kPitch);
    for (int64_t n = end; n < begin + kGemmOutputs && (n - begin) % kTileOutputs; ++n)
      std::fill_n(tile + (n - begin) * kPitch, count * kBlock, 0.0f);
    for (int64_t top = 0; top < p.rows; top += kGemmRows)
      for (int64_t n = begin; n < end; n += kTileOutputs)
        for (int64_t m = top; m < std::min(top + kGemmRows, p.rows); m += kTileRows)
          Unrolled<kTileRows>(p.rows - m, [&](auto rows) {
            Tile<rows.value>(p.x + m * p.x_stride + b * kBlock, p.x_stride, tile + (n - begin) * kPitch, kPitch,
                             count * kBlock, b > 0, p.out + m * p.outputs + n, p.outputs, end - n);
          });
  }
}

inline float Widen(float value) { return value; }

inline float Widen(uint16_t bf16) {
  uint32_t bits = uint32_t{bf16} << 16;
  return Load<float>(&bits);
}

// One row of x as Problem describes it.
template <class F, class T>
void Arrange(const T* x, int64_t inputs, int64_t blocks, bool sums, float* out) {
  for (int64_t b = 0; b < blocks; ++b, out += kBlock) {
    float values[kBlock] = {};
    int64_t count = std::clamp<int64_t>(inputs - b * kBlock, 0, kBlock);
    if (count == kBlock) {
      for (int k = 0; k < kBlock; ++k) values[k] = Widen(x[b * kBlock + k]);
    } else {
      for (int64_t k = 0; k < count; ++k) values[k] = Widen(x[b * kBlock + k]);
    }
    if constexpr (F::kOrdered) {
      float total[kLanes] = {};
      for (int k = 0; k < kBlock; ++k) {
        int position = F::PositionOf(k);
        out[position] = values[k] * (1.0f / F::UnitOf(position));
        total[position % kLanes] += values[k];
      }
      if (!sums) continue;
      for (int i = 0; i < kLanes; ++i) out[kBlock + i] = F::kOffset != 0 ? -F::kOffset * total[i] : total[i];
      out += kLanes;
    } else {
      std::memcpy(out, values, sizeof values);
    }
  }
}

// Runs f(0) … f(count − 1) on the caller and on pool threads that turn up in time. The caller can finish alone and
// waits only for parts that have begun, so a pool whose threads are all busy or waiting cannot stall it.
template <class Function>
void Parallel(ffi::ThreadPool& pool, int64_t count, const Function& f) {
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto shared = std::make_shared<Shared>();
  // f lives on the caller's stack: a late thread finds nothing left and does not touch it.
  auto work = [shared, count, &f] {
    for (int64_t i; (i = shared->next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      f(i);
      shared->done.fetch_add(1, std::memory_order_release);
    }
  };
  int64_t helpers = count > 1 ? std::min(pool.num_threads(), count) - 1 : 0;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([work] { work(); });
  work();
  for (int spins = 0; shared->done.load(std::memory_order_acquire) < count; ++spins)
    if (spins > 1000) std::this_thread::yield();
}

template <class F>
ffi::Error Run(ffi::ThreadPool& pool, Problem p, ffi::AnyBuffer x) {
  bool few = p.rows <= kDotLimit, sums = few && kSums<F>, is_bf16 = x.element_type() == ffi::DataType::BF16;
  std::unique_ptr<float[]> arranged;
  p.x_stride = p.inputs;
  p.x = static_cast<const float*>(x.untyped_data());
  if (F::kOrdered || is_bf16 || p.inputs != p.blocks * kBlock) {
    p.x_stride = p.blocks * (kBlock + (sums ? kLanes : 0));
    arranged.reset(new float[p.rows * p.x_stride + 16]);
    auto* aligned = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(arranged.get()) + 63) / 64 * 64);
    p.x = aligned;
    Parallel(pool, (p.rows + 15) / 16, [&](int64_t part) {
      for (int64_t m = part * 16; m < std::min(part * 16 + 16, p.rows); ++m) {
        float* row = aligned + m * p.x_stride;
        if (is_bf16) {
          Arrange<F>(static_cast<const uint16_t*>(x.untyped_data()) + m * p.inputs, p.inputs, p.blocks, sums, row);
        } else {
          Arrange<F>(static_cast<const float*>(x.untyped_data()) + m * p.inputs, p.inputs, p.blocks, sums, row);
        }
      }
    });
  }
  int64_t step = few ? std::max<int64_t>(1, kChunkBytes / p.row_bytes) : kGemmOutputs;
  Parallel(pool, (p.outputs + step - 1) / step, [&](int64_t i) {
    int64_t begin = i * step, end = std::min(begin + step, p.outputs);
    few ? DotChunk<F>(p, begin, end) : GemmChunk<F>(p, begin, end);
  });
  return ffi::Error::Success();
}

ffi::Error Matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> index, ffi::AnyBuffer values,
                  ffi::RemainingArgs scales, ffi::Result<ffi::Buffer<ffi::F32>> out, std::string_view format) {
  auto shape = values.dimensions();
  if (x.dimensions().size() != 2 || shape.size() != 3 || shape[0] < 1)
    return ffi::Error::InvalidArgument("matmul takes x [M, K] and a stack of weights [S, N, K]");
  if (x.element_type() != ffi::DataType::F32 && x.element_type() != ffi::DataType::BF16)
    return ffi::Error::InvalidArgument("matmul takes x in float32 or bfloat16");
  Problem p{};
  p.rows = x.dimensions()[0], p.inputs = x.dimensions()[1], p.outputs = shape[1], p.out = out->typed_data();
  p.row_bytes = shape[2] * ffi::ByteWidth(values.element_type());
  int64_t stored = shape[2] * (format == "int4" || format == "int4-min" ? 2 : 1);
  p.blocks = (stored + kBlock - 1) / kBlock;
  if (p.inputs > stored || out->element_count() != size_t(p.rows * p.outputs))
    return ffi::Error::InvalidArgument("matmul's shapes of x, weights and result do not fit together");
  if (out->element_count() == 0) return ffi::Error::Success();
  if (p.row_bytes == 0) return std::fill_n(p.out, out->element_count(), 0.0f), ffi::Error::Success();
  int64_t at = std::clamp<int64_t>(*index.typed_data(), 0, shape[0] - 1);  // as XLA clamps the start of a slice
  p.values = static_cast<const uint8_t*>(values.untyped_data()) + at * p.outputs * p.row_bytes;
  for (size_t i = 0; i < scales.size(); ++i) {
    auto part = scales.get<ffi::AnyBuffer>(i);
    if (!part) return part.error();
    auto* data = static_cast<const uint8_t*>(part->untyped_data()) + at * (part->size_bytes() / shape[0]);
    (i == 0 ? p.scale : p.minimum) = data;
  }
  if (format == "f32") return Run<F32>(pool, p, x);
  if (format == "bf16") return Run<Bf16>(pool, p, x);
  if (format == "f16") return Run<F16>(pool, p, x);
  if (format == "fp8") return Run<Fp8>(pool, p, x);
  if (format == "int8") return Run<Int8>(pool, p, x);
  if (format == "int8-g32") return Run<Int8Grouped>(pool, p, x);
  if (format == "int4") return Run<Int4>(pool, p, x);
  if (format == "int4-min") return Run<Int4Minimum>(pool, p, x);
  return ffi::Error::InvalidArgument("matmul does not know the number format " + std::string(format));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxwaferMatmul, Matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<std::string_view>("format"));
