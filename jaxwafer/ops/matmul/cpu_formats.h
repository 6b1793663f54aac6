// Number formats of weights for the CPU kernels: vectors of the width of the target, and how each format of
// quant/formats.py unpacks to them. XLA runs with denormals flushed to zero, so nothing here passes through a denormal
// float32.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kBlock = 32;  // weights unpacked at a time, and the group size of grouped formats
constexpr int kVectors = kBlock / kLanes;

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

// Stops the compiler from loading v again at each use.
inline Floats Keep(Floats v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__x86_64__)
  asm("" : "+x"(v));
#endif
  return v;
}

inline float Sum(Floats v) {
  float lanes[kLanes];
  std::memcpy(lanes, &v, sizeof v);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

// Widening and repeating, which GCC does not make of __builtin_convertvector.
#if defined(__AVX512F__)
inline Floats FromBytes(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(Load<__m128i>(p))); }
inline Words FromWords16(Halves h) { return (Words)_mm512_cvtepu16_epi32((__m256i)h); }
inline Words Repeat(const uint8_t* p) { return (Words)_mm512_broadcast_i32x4(Load<__m128i>(p)); }
#elif defined(__AVX2__)
inline Floats FromBytes(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline Words FromWords16(Halves h) { return (Words)_mm256_cvtepu16_epi32((__m128i)h); }
inline Words Repeat(const uint8_t* p) { return (Words)_mm256_broadcastsi128_si256(Load<__m128i>(p)); }
#else
inline Floats FromBytes(const uint8_t* p) {
  return __builtin_convertvector(__builtin_convertvector(Load<Bytes>(p), Ints), Floats);
}
inline Words FromWords16(Halves h) { return __builtin_convertvector(h, Words); }
inline Words Repeat(const uint8_t* p) { return Load<Words>(p); }
#endif

inline Floats FromBf16(Halves h) {
  Words bits = FromWords16(h) << 16;
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

// A format: bytes in a block of 32 weights, and Unpack to floats that still want the scale. kOrdered: x is arranged as
// PositionOf says and divided by UnitOf, which Unpack multiplies into the weight there. kUnit: a factor of the scale.
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
#if defined(__AVX2__)
      Halves16 h = (Halves16)_mm256_cvtepi8_epi16(Load<__m128i>(p + part * 16));
#else
      Halves16 h = __builtin_convertvector(Load<Bytes16>(p + part * 16), Halves16);
#endif
      h = (h << 7) & (int16_t)0xbfff;
      h |= (h & (int16_t)0x3fff) == (int16_t)0x3f80;  // the one NaN of e4m3
      for (int v = 0; v < 16 / kLanes; ++v)
        w[part * (16 / kLanes) + v] = FromHalf(Load<Halves>((const char*)&h + v * kLanes * 2));
    }
  }
};

struct Int8 : Plain {
  static constexpr int kBytes = 32;
  static void Unpack(const uint8_t* p, Floats* w) {
    for (int v = 0; v < kVectors; ++v) w[v] = FromBytes(p + v * kLanes);
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
    Words words = Repeat(p);
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

}  // namespace
