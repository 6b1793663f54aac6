// Vectors of the width of the target, and conversions to them. XLA runs with denormals flushed to zero, so nothing here
// passes through a denormal float32.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define JAXWAFER_LANES 16
#elif defined(__AVX2__) && defined(__F16C__)
#define JAXWAFER_LANES 8
#else
#define JAXWAFER_LANES 4
#endif
constexpr int kLanes = JAXWAFER_LANES;

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));
typedef int8_t Bytes __attribute__((vector_size(kLanes)));
typedef uint8_t UBytes __attribute__((vector_size(kLanes)));

template <class T>
inline T Load(const void* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

template <class T>
inline void Store(void* p, T value) {
  std::memcpy(p, &value, sizeof value);
}

// The first `count` elements of a vector, and zeros.
template <class T>
inline T LoadUpTo(const void* p, int64_t count) {
  constexpr int64_t kSize = sizeof(T) / sizeof(T{}[0]);
  if (count >= kSize) return Load<T>(p);
#if JAXWAFER_LANES == 16
  if constexpr (sizeof(T) == 64 && kSize == 16) return (T)_mm512_maskz_loadu_epi32(__mmask16((1u << count) - 1), p);
  if constexpr (sizeof(T) == 32 && kSize == 16) return (T)_mm256_maskz_loadu_epi16(__mmask16((1u << count) - 1), p);
  if constexpr (sizeof(T) == 16 && kSize == 16) return (T)_mm_maskz_loadu_epi8(__mmask16((1u << count) - 1), p);
#endif
  T value{};
  std::memcpy(&value, p, count * (sizeof(T) / kSize));
  return value;
}

inline Ints Lanes() {
  Ints lane{};
  for (int l = 0; l < kLanes; ++l) lane[l] = l;
  return lane;
}

inline Floats Splat(float value) { return Floats{} + value; }

inline Floats Max(Floats a, Floats b) { return a > b ? a : b; }

// Keeps v in a register: the compiler neither loads it again at each use nor puts off making it.
template <class V>
inline V Keep(V v) {
#if JAXWAFER_LANES == 16
  asm("" : "+v"(v));
#elif defined(__x86_64__)
  asm("" : "+x"(v));
#endif
  return v;
}

inline float Sum(Floats v) {
#if JAXWAFER_LANES == 16
  return _mm512_reduce_add_ps((__m512)v);
#elif JAXWAFER_LANES == 8
  __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
#else
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

// Widening, repeating and permuting, which GCC does not make of __builtin_convertvector.
#if JAXWAFER_LANES == 16
inline Floats FromBytes(const void* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(Load<__m128i>(p))); }
inline Words FromWords16(Halves h) { return (Words)_mm512_cvtepu16_epi32((__m256i)h); }
inline Words Repeat(const void* p) { return (Words)_mm512_broadcast_i32x4(Load<__m128i>(p)); }
inline Words Widened(UBytes e) { return (Words)_mm512_cvtepu8_epi32((__m128i)e); }
inline Floats Spread(Floats v, Ints index) { return (Floats)_mm512_permutexvar_ps((__m512i)index, (__m512)v); }
#elif JAXWAFER_LANES == 8
inline Floats FromBytes(const void* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(Load<int64_t>(p))));
}
inline Words FromWords16(Halves h) { return (Words)_mm256_cvtepu16_epi32((__m128i)h); }
inline Words Repeat(const void* p) { return (Words)_mm256_broadcastsi128_si256(Load<__m128i>(p)); }
inline Words Widened(UBytes e) {
  int64_t bytes = Load<int64_t>(&e);
  return (Words)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bytes));
}
inline Floats Spread(Floats v, Ints index) { return (Floats)_mm256_permutevar8x32_ps((__m256)v, (__m256i)index); }
#else
inline Floats FromBytes(const void* p) {
  return __builtin_convertvector(__builtin_convertvector(Load<Bytes>(p), Ints), Floats);
}
inline Words FromWords16(Halves h) { return __builtin_convertvector(h, Words); }
inline Words Repeat(const void* p) { return Load<Words>(p); }
inline Words Widened(UBytes e) { return __builtin_convertvector(e, Words); }
inline Floats Spread(Floats v, Ints index) {
  Floats out;
  for (int i = 0; i < kLanes; ++i) out[i] = v[index[i]];
  return out;
}
#endif

inline Floats FromUnsigned(UBytes bytes) { return __builtin_convertvector((Ints)Widened(bytes), Floats); }

// The highest lane; numbers that are none count as what they are compared with.
inline float Most(Floats v) {
#if JAXWAFER_LANES == 16
  return _mm512_reduce_max_ps((__m512)v);
#endif
  float most = v[0];
  for (int i = 1; i < kLanes; ++i) most = v[i] > most ? v[i] : most;
  return most;
}

// The sums of four vectors.
inline void SumEach(const Floats* v, float* out) {
#if JAXWAFER_LANES == 16
  // Each step adds the halves of two vectors into the halves of one.
  auto halves = [](Floats a, Floats b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0x44), _mm512_shuffle_f32x4((__m512)a, (__m512)b, 0xee));
  };
  __m512 low = halves(v[0], v[1]), high = halves(v[2], v[3]);
  __m512 all = _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
  all = _mm512_add_ps(all, _mm512_permute_ps(all, 0xb1));
  all = _mm512_add_ps(all, _mm512_permute_ps(all, 0x4e));
  Store(out, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, all)));
#else
  for (int i = 0; i < 4; ++i) out[i] = Sum(v[i]);
#endif
}

// Powers of two by their exponents, 255 for NaN.
inline Floats FromE8m0(UBytes exponents) {
  Words e = Widened(exponents);
  Words bits = e << 23 | ((Words)(e == 255) & 0x00400000);
  return Load<Floats>(&bits);
}

inline Floats FromBf16(Halves h) {
  Words bits = FromWords16(h) << 16;
  return Load<Floats>(&bits);
}

inline Floats FromHalf(Halves h) {
#if JAXWAFER_LANES == 16
  return (Floats)_mm512_cvtph_ps(Load<__m256i>(&h));
#elif JAXWAFER_LANES == 8
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

// e4m3 as float16, whose exponent bias is 8 larger: 256 times too small.
constexpr float kFp8Unit = 256;

inline Floats FromFp8(const void* p) {
#if JAXWAFER_LANES == 16
  __m256i h = _mm256_cvtepi8_epi16(Load<__m128i>(p));
  h = _mm256_and_si256(_mm256_slli_epi16(h, 7), _mm256_set1_epi16((int16_t)0xbfff));
  __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(h, _mm256_set1_epi16(0x3fff)), _mm256_set1_epi16(0x3f80));
  h = _mm256_or_si256(h, nan);  // the one NaN of e4m3
  return FromHalf((Halves)h);
#elif JAXWAFER_LANES == 8
  __m128i h = _mm_cvtepi8_epi16(_mm_cvtsi64_si128(Load<int64_t>(p)));
  h = _mm_and_si128(_mm_slli_epi16(h, 7), _mm_set1_epi16((int16_t)0xbfff));
  __m128i nan = _mm_cmpeq_epi16(_mm_and_si128(h, _mm_set1_epi16(0x3fff)), _mm_set1_epi16(0x3f80));
  return FromHalf((Halves)_mm_or_si128(h, nan));
#else
  typedef int16_t Shorts __attribute__((vector_size(kLanes * 2)));
  Shorts h = __builtin_convertvector(Load<Bytes>(p), Shorts);
  h = (h << 7) & (int16_t)0xbfff;
  h |= (h & (int16_t)0x3fff) == (int16_t)0x3f80;
  return FromHalf((Halves)h);
#endif
}

// exp(x) to about 2 units in the last place: x = n·ln 2 + r, a polynomial in r (as in Cephes' expf), times 2ⁿ. Zero
// below −87, infinite above 89.
inline Floats Exp(Floats x) {
  constexpr float kMagic = 12582912.0f;  // 1.5 · 2²³: its last bits are the nearest whole number
  Floats low = x < -87.0f ? Splat(-87.0f) : x;
  Floats in = low > 89.0f ? Splat(89.0f) : low;
  Floats shifted = in * 1.44269504f + kMagic, n = shifted - kMagic;
  Floats r = in - n * 0.693359375f + n * 2.12194440e-4f;
  Floats p = Splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  // In two factors, so that 2¹²⁸ is reached.
  Ints half = (Ints)(Load<Ints>(&shifted) - Load<int32_t>(&kMagic)), first = half >> 1, rest = half - first;
  Ints a = (first + 127) << 23, b = (rest + 127) << 23;
  Floats value = p * Load<Floats>(&a) * Load<Floats>(&b);
  return x < -87.0f ? Floats{} : value;
}

// ln x of positive normal numbers to about 2 units in the last place: x = m·2ⁿ with m around 1, a polynomial in m − 1 (as
// in Cephes' logf).
inline Floats Log(Floats x) {
  Words bits = Load<Words>(&x), start = Words{} + 0x3f3504f3u;  // the bits of √½
  Ints n = (Ints)(bits - start) >> 23;
  Words mantissa = bits - ((Words)n << 23);
  Floats m = Load<Floats>(&mantissa) - 1.0f, e = __builtin_convertvector(n, Floats), square = m * m;
  Floats p = Splat(7.0376836292e-2f);
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  return p * m * square - e * 2.12194440e-4f - 0.5f * square + m + e * 0.693359375f;
}

inline float Widen(float value) { return value; }

inline float Widen(uint16_t bf16) {
  uint32_t bits = uint32_t{bf16} << 16;
  return Load<float>(&bits);
}

// The nearest bfloat16, ties to even, as float32.
inline float RoundBf16(float value) {
  uint32_t bits = Load<uint32_t>(&value);
  if ((bits & 0x7fffffff) > 0x7f800000) return value;
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
  return Load<float>(&bits);
}

// The nearest number of its kind.
inline void Narrow(float value, float& to) { to = value; }

inline void Narrow(float value, uint16_t& bf16) {
  float nearest = RoundBf16(value);
  bf16 = Load<uint32_t>(&nearest) >> 16 | (nearest != nearest) << 6;
}

}  // namespace
