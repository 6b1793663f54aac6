// Quantised matmul on CPU, an XLA FFI handler: out[M, N] = x[M, K] · W[index]ᵀ with W a stack [S, N, K] in the storage
// layout of quant/formats.py. Weights are widened to float32 and accumulated in float32; activations are not quantised.
//
// Both operands run along K, so a dot product may take K in any order: a format names the order in which it unpacks
// fastest, and x is rearranged to it once per call. Few rows of x: unpack in registers and multiply at once (`Dot`),
// which is bound by reading the weights. Many rows: write out tiles of weights and multiply those (`Gemm`).
//
// Vectors are the compiler's own (GCC, Clang); their width follows the target. XLA runs with denormals flushed to zero,
// so nothing here passes through a denormal float32.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string_view>
#include <thread>

#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kTileRows = 6;  // rows of x in a register tile: 24 of 32 registers accumulate
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kTileRows = 3;  // 12 of 16
#else
constexpr int kLanes = 4;
constexpr int kTileRows = 3;
#endif
constexpr int kBlock = 32;               // weights unpacked at a time, and the group size of grouped formats
constexpr int kVectors = kBlock / kLanes;
constexpr int kTileOutputs = 4;          // outputs in a register tile
constexpr int kDotRows = 4;              // most rows of x that share one unpacking in Dot
constexpr int64_t kDotLimit = 8;         // most rows of x for Dot
constexpr int64_t kChunkBytes = 32768;   // of weights, the unit of work in Dot
constexpr int64_t kGemmOutputs = 32, kGemmBlocks = 32, kGemmRows = 48;  // tile of weights, 128 KiB, and of x

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));
typedef int8_t Bytes __attribute__((vector_size(kLanes)));

template <class T>
inline T Load(const void* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

inline Floats Splat(float value) { return value - Floats{}; }

inline float Sum(Floats v) {
  float lanes[kLanes];
  std::memcpy(lanes, &v, sizeof v);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

inline Floats FromBf16(Halves h) {
  Words bits = __builtin_convertvector(h, Words) << 16;
  return Load<Floats>(&bits);
}

inline Floats FromHalf(Halves h) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(Load<__m256i>(&h));
#elif defined(__AVX2__) && defined(__F16C__)
  return (Floats)_mm256_cvtph_ps(Load<__m128i>(&h));
#else
  Words wide = __builtin_convertvector(h, Words), size = wide & 0x7fff, sign = (wide & 0x8000) << 16;
  Words normal = (size << 13) + (112u << 23);
  normal += (Words)(size >= 0x7c00) & (112u << 23);
  Floats small = __builtin_convertvector((Ints)size, Floats) * 0x1p-24f;
  Words is_small = (Words)(size < 0x400);
  Words bits = (is_small & Load<Words>(&small)) | (~is_small & normal) | sign;
  return Load<Floats>(&bits);
#endif
}

// A format: bytes in a block of 32 weights, and Unpack to floats that still want the scale. kOrdered: x is rearranged
// as PositionOf says and divided by UnitOf, which Unpack multiplies into the weight there. kUnit: a factor of the scale.
struct Plain {
  static constexpr bool kGrouped = false, kMinimum = false, kOrdered = false;
  static constexpr float kOffset = 0, kUnit = 1;
};

struct F32 : Plain {
  static constexpr int kBytes = 128;
  static void Unpack(const uint8_t* p, Floats* w) {
    for (int v = 0; v < kVectors; ++v) w[v] = Load<Floats>(p + v * kLanes * 4);
  }
};

struct Bf16 : Plain {
  static constexpr int kBytes = 64;
  static void Unpack(const uint8_t* p, Floats* w) {
    for (int v = 0; v < kVectors; ++v) w[v] = FromBf16(Load<Halves>(p + v * kLanes * 2));
  }
};

struct F16 : Plain {
  static constexpr int kBytes = 64;
  static void Unpack(const uint8_t* p, Floats* w) {
    for (int v = 0; v < kVectors; ++v) w[v] = FromHalf(Load<Halves>(p + v * kLanes * 2));
  }
};

struct Fp8 : Plain {
  static constexpr int kBytes = 32;
  static constexpr float kUnit = 256;  // e4m3 bits read as float16, whose exponent bias is 8 larger
  typedef int8_t Bytes16 __attribute__((vector_size(16)));
  typedef int16_t Halves16 __attribute__((vector_size(32)));
  static void Unpack(const uint8_t* p, Floats* w) {
    for (int part = 0; part < kBlock / 16; ++part) {
      Halves16 h = (__builtin_convertvector(Load<Bytes16>(p + part * 16), Halves16) << 7) & (int16_t)0xbfff;
      h |= (h & 0x3fff) == 0x3f80;  // the one NaN of e4m3
      for (int v = 0; v < 16 / kLanes; ++v)
        w[part * (16 / kLanes) + v] = FromHalf(Load<Halves>((const char*)&h + v * kLanes * 2));
    }
  }
};

struct Int8 : Plain {
  static constexpr int kBytes = 32;
  static void Unpack(const uint8_t* p, Floats* w) {
    for (int v = 0; v < kVectors; ++v)
      w[v] = __builtin_convertvector(__builtin_convertvector(Load<Bytes>(p + v * kLanes), Ints), Floats);
  }
};

struct Int8Grouped : Int8 {
  static constexpr bool kGrouped = true;
};

// The 16 bytes of a block are 4 words of 8 nibbles. A vector takes kLanes / 4 nibbles from all 4 words, masked where
// they stand and not shifted down, which leaves them multiplied by a power of 16.
struct Int4 {
  static constexpr int kBytes = 16;
  static constexpr bool kGrouped = true, kMinimum = false, kOrdered = true;
  static constexpr float kOffset = 8, kUnit = 1;
  static constexpr int PositionOf(int k) { return k % 8 * 4 + k / 8; }
  static constexpr float UnitOf(int position) { return float(1 << position / 4 % 4 * 4); }
  static void Unpack(const uint8_t* p, Floats* w) {
    Words words;
    for (int i = 0; i < kLanes / 4; ++i) std::memcpy((char*)&words + i * 16, p, 16);
    for (int v = 0; v < kVectors; ++v) {
      Words mask{};
      for (int i = 0; i < kLanes; ++i) mask[i] = 15u << (v * kLanes + i) / 4 % 4 * 4;
      Words masked = (v * kLanes < kBlock / 2 ? words : words >> 16) & mask;
      w[v] = __builtin_convertvector((Ints)masked, Floats);
    }
  }
};

struct Int4Minimum : Int4 {
  static constexpr bool kMinimum = true;
  static constexpr float kOffset = 0;
};

// One call. x holds `blocks` blocks a row, in the format's order, zero beyond the given K; in Dot each block is followed
// by a vector of its sums over vectors where the format has an offset or a minimum.
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

// Output n for R rows of x from row m.
template <class F, int R>
inline void Dot(const Problem& p, int64_t n, int64_t m) {
  constexpr int kPitch = kBlock + (kSums<F> ? kLanes : 0), kChains = R == 1 ? 4 : 2;
  const uint8_t* row = p.values + n * p.row_bytes;
  const float* x = p.x + m * p.x_stride;
  alignas(64) uint8_t spare[128];
  Floats sum[R][kChains] = {};
  if constexpr (F::kGrouped) {
    for (int64_t first = 0; first < p.blocks; first += kLanes) {
      int64_t count = std::min<int64_t>(kLanes, p.blocks - first), offset = (n * p.blocks + first) * 2;
      float scale[kLanes], minimum[kLanes];
      Scales(p.scale + offset, count, scale);
      if (F::kMinimum) Scales(p.minimum + offset, count, minimum);
      for (int64_t i = 0; i < count; ++i) {
        Floats w[kVectors];
        F::Unpack(row + (first + i) * F::kBytes, w);
        for (int r = 0; r < R; ++r) {
          const float* block = x + r * p.x_stride + (first + i) * kPitch;
          Floats group = F::kOffset != 0 ? Load<Floats>(block + kBlock) : Floats{};
          for (int v = 0; v < kVectors; ++v) group += w[v] * Load<Floats>(block + v * kLanes);
          sum[r][0] += group * scale[i];
          if (F::kMinimum) sum[r][1] += minimum[i] * Load<Floats>(block + kBlock);
        }
      }
    }
    for (int r = 0; r < R; ++r) p.out[(m + r) * p.outputs + n] = Sum(sum[r][0] + sum[r][1]);
  } else {
    for (int64_t b = 0; b < p.blocks; ++b) {
      Floats w[kVectors];
      F::Unpack(Block<F>(p, row, b, spare), w);
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < kVectors; ++v)
          sum[r][v % kChains] += w[v] * Load<Floats>(x + r * p.x_stride + b * kPitch + v * kLanes);
    }
    for (int r = 0; r < R; ++r) {
      Floats total = sum[r][0] + sum[r][1];
      if constexpr (kChains == 4) total += sum[r][2] + sum[r][3];
      p.out[(m + r) * p.outputs + n] = Sum(total) * RowScale<F>(p, n);
    }
  }
}

// Calls f with the integral constant of count, 1 to Most.
template <int Most, class Function>
inline void Unrolled(int64_t count, const Function& f) {
  if constexpr (Most > 1) {
    if (count < Most) return Unrolled<Most - 1>(count, f);
  }
  f(std::integral_constant<int, Most>{});
}

template <class F>
void DotChunk(const Problem& p, int64_t begin, int64_t end) {
  for (int64_t n = begin; n < end; ++n)
    for (int64_t m = 0; m < p.rows; m += kDotRows)
      Unrolled<kDotRows>(p.rows - m, [&](auto count) { Dot<F, count.value>(p, n, m); });
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
  Floats sum[R][kTileOutputs] = {};
  for (int64_t k = 0; k < size; k += kLanes) {
    Floats weight[kTileOutputs];
    for (int n = 0; n < kTileOutputs; ++n) weight[n] = Load<Floats>(w + n * w_stride + k);
    for (int r = 0; r < R; ++r) {
      Floats value = Load<Floats>(x + r * x_stride + k);
      for (int n = 0; n < kTileOutputs; ++n) sum[r][n] += value * weight[n];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < kTileOutputs; ++n)
      if (n < outputs) out[r * out_stride + n] = Sum(sum[r][n]) + (add ? out[r * out_stride + n] : 0.0f);
}

template <class F>
void GemmChunk(const Problem& p, int64_t begin, int64_t end) {
  constexpr int64_t kPitch = kGemmBlocks * kBlock;
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

// Runs f(0) … f(count − 1) on the caller and on pool threads that turn up in time. The caller can finish alone and waits
// only for parts that have begun, so a pool whose threads are all busy or waiting cannot stall it.
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
    arranged.reset(new float[p.rows * p.x_stride]);
    p.x = arranged.get();
    Parallel(pool, (p.rows + 15) / 16, [&](int64_t part) {
      for (int64_t m = part * 16; m < std::min(part * 16 + 16, p.rows); ++m) {
        float* row = arranged.get() + m * p.x_stride;
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
