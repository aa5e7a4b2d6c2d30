// Integer keys that order voxels by height, and helpers to find the highest neighbor of each voxel.
//
// A key contains the bits of a float32 height in an order-preserving form. Its last five bits are replaced with the
// position of the voxel modulo 3 along each axis. These bits identify a neighbor and break ties, so every path ends.

#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "../../engine/cpu/simd.hpp"

namespace {

constexpr int32_t BACKGROUND_KEY = INT32_MIN;
constexpr int32_t POSITION_BITS = 31;
constexpr int NUM_CODES = 32;
constexpr int NUM_NEIGHBORS = 26;

template <typename Score> inline bool is_above(const Score *score, float threshold) { return load_one(score) > threshold; }
inline bool is_above(const uint8_t *mask, float) { return *mask != 0; }

// Encodes a foreground logit as one byte, in steps of 1/16 from -8 to 8. Voxels of a mask have the highest code.
template <typename Score> inline uint8_t code_of(const Score *score) {
  return static_cast<uint8_t>(std::min(std::max(0.0f, load_one(score) * 16 + 128.5f), 255.0f));
}
inline uint8_t code_of(const uint8_t *) { return 255; }

// Fixed-point representation of a foreground probability of 1.
constexpr double PROBABILITY_ONE = 65536;

// Returns the fixed-point probability of every code.
inline const std::array<int32_t, 256> &probabilities() {
  static const std::array<int32_t, 256> table = [] {
    std::array<int32_t, 256> values;
    for (int code = 0; code < 256; ++code)
      values[code] = static_cast<int32_t>(std::lround(PROBABILITY_ONE / (1 + std::exp((128 - code) / 16.0))));
    return values;
  }();
  return table;
}

// Maps a height to a key that sorts in the same order. The position bits are zero.
inline int32_t key_of(float height) {
  int32_t bits;
  std::memcpy(&bits, &height, sizeof bits);
  return (bits ^ ((bits >> 31) & INT32_MAX)) & ~POSITION_BITS;
}

// Inverts `key_of`, except for the dropped bits.
inline float height_of(int32_t key) {
  const int32_t ordered = key & ~POSITION_BITS, bits = ordered ^ ((ordered >> 31) & INT32_MAX);
  float height;
  std::memcpy(&height, &bits, sizeof height);
  return height;
}

inline int32_t highest_of(int32_t a, int32_t b, int32_t c) { return std::max(std::max(a, b), c); }

// Writes for each voxel of one plane the highest key of the voxel and its 8 neighbors in the plane. Skips the padding.
void max_filter_plane(const int32_t *keys, int64_t size, int64_t width, int32_t *along_x, int32_t *highest) {
  for (int64_t i = 1; i < size - 1; ++i)
    along_x[i] = highest_of(keys[i - 1], keys[i], keys[i + 1]);
  for (int64_t i = width + 1; i < size - width - 1; ++i)
    highest[i] = highest_of(along_x[i - width], along_x[i], along_x[i + width]);
}

// Appends the positions of the foreground voxels from `begin` to `end` to a list of `count` positions, and returns the new
// count. May write up to 15 values beyond the end of the list.
inline int64_t list_foreground(const int32_t *keys, int64_t begin, int64_t end, int32_t *positions, int64_t count) {
#ifdef __AVX512F__
  const __m512i background = _mm512_set1_epi32(BACKGROUND_KEY);
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (; begin + 16 <= end; begin += 16) {
    const __mmask16 foreground = _mm512_cmpneq_epi32_mask(_mm512_loadu_si512(keys + begin), background);
    const __m512i candidates = _mm512_add_epi32(first, _mm512_set1_epi32(static_cast<int32_t>(begin)));
    _mm512_storeu_si512(positions + count, _mm512_maskz_compress_epi32(foreground, candidates));
    count += __builtin_popcount(foreground);
  }
#endif
  // Branchless, because a branch would be mispredicted at the edge of every object.
  for (int64_t position = begin; position < end; ++position) {
    positions[count] = static_cast<int32_t>(position);
    count += keys[position] != BACKGROUND_KEY;
  }
  return count;
}

// Memory whose pages are allocated when they are first written.
template <typename T> class Pages {
public:
  explicit Pages(int64_t size, bool zeros = false)
      : data_(static_cast<T *>(zeros ? std::calloc(size, sizeof(T)) : std::malloc(size * sizeof(T)))) {
    if (!data_)
      throw std::bad_alloc();
  }
  T *get() const { return data_.get(); }

private:
  struct Free {
    void operator()(T *data) const { std::free(data); }
  };
  std::unique_ptr<T, Free> data_;
};

// `depth` is the minimum depth of a pass below the lower of two peaks of separate objects, in units of the distance.
// `heights_are_logits` indicates that heights are logits of the distance.
struct Persistence {
  double depth;
  bool heights_are_logits;

  double distance(float height) const {
    return heights_are_logits ? 1 / (1 + std::exp(-static_cast<double>(height))) : static_cast<double>(height);
  }

  // Returns the lowest key of a relevant pass near a peak with this key, rounded down.
  int32_t lowest_pass_key(int32_t peak_key) const {
    double lowest = distance(height_of(peak_key)) - depth;
    if (heights_are_logits) {
      lowest = std::min(std::max(lowest, 0.0), 1.0);
      lowest = std::log(lowest / (1 - lowest));
    }
    lowest = std::isfinite(lowest) ? lowest - 1e-5 * std::fabs(lowest) : -INFINITY;
    return key_of(static_cast<float>(lowest));
  }
};

// Values of some planes, with arbitrary strides. `kind` is 0 for float32, 1 for bfloat16 and 2 for bytes.
struct Planes {
  const void *data;
  int32_t kind;
  const int64_t *strides;
};

} // namespace
