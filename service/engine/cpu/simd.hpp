// SIMD vectors for computation in float32, loaded from and stored to float32 or bfloat16.

#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX512BF16__) && defined(__AVX512VL__)
#include <immintrin.h>
#endif

namespace {

constexpr int CACHE_LINE_FLOATS = 64 / sizeof(float);

// Types of vectors with N elements: `Floats` for computation, `Stored` and `Halves` for float32 and bfloat16 in memory.
template <int N> struct Vectors {
  typedef float Floats __attribute__((vector_size(4 * N)));
  typedef float Stored __attribute__((vector_size(4 * N), aligned(4), may_alias));
  typedef uint32_t Bits __attribute__((vector_size(4 * N)));
  typedef uint16_t Halves __attribute__((vector_size(2 * N), aligned(2), may_alias));
};

template <int N> using Floats = typename Vectors<N>::Floats;

enum class Bfloat16 : uint16_t {};

inline float load_one(const float *p) { return *p; }
inline float load_one(const Bfloat16 *p) {
  const uint32_t bits = static_cast<uint32_t>(*p) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline void store_one(float *p, float value) { *p = value; }
// Rounds to nearest, ties to even; NaN stays NaN.
inline void store_one(Bfloat16 *p, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t high = bits >> 16;
  *p = static_cast<Bfloat16>(value == value ? (bits + 0x7fff + (high & 1)) >> 16 : high | 0x40);
}

template <int N> inline Floats<N> load(const float *p) {
  return *reinterpret_cast<const typename Vectors<N>::Stored *>(p);
}

template <int N> inline Floats<N> load(const Bfloat16 *p) {
  typedef typename Vectors<N>::Bits Bits;
  const auto halves = *reinterpret_cast<const typename Vectors<N>::Halves *>(p);
  return reinterpret_cast<Floats<N>>(__builtin_convertvector(halves, Bits) << 16);
}

template <int N> inline void store(float *p, Floats<N> v) { *reinterpret_cast<typename Vectors<N>::Stored *>(p) = v; }

// Rounds to nearest, ties to even; NaN stays NaN.
template <int N> inline void store(Bfloat16 *p, Floats<N> v) {
  typedef typename Vectors<N>::Halves Halves;
#if defined(__AVX512BF16__) && defined(__AVX512VL__)
  if constexpr (N == 16)
    *reinterpret_cast<Halves *>(p) = reinterpret_cast<Halves>(_mm512_cvtneps_pbh(v));
  else
    *reinterpret_cast<Halves *>(p) = reinterpret_cast<Halves>(_mm256_cvtneps_pbh(v));
#else
  typedef typename Vectors<N>::Bits Bits;
  const Bits bits = reinterpret_cast<Bits>(v), high = bits >> 16;
  const Bits rounded = v == v ? (bits + 0x7fff + (high & 1)) >> 16 : high | 0x40;
  *reinterpret_cast<Halves *>(p) = __builtin_convertvector(rounded, Halves);
#endif
}

} // namespace
