// Integer keys that order voxels by height, and helpers to find the highest neighbor of each voxel.
//
// A key contains the bits of a float32 height in an order-preserving form. Its last five bits are replaced with the
// position of the voxel modulo 3 along each axis. These bits identify a neighbor and break ties, so every path ends.

#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../../engine/cpu/simd.hpp"

namespace {

constexpr int32_t BACKGROUND_KEY = INT32_MIN;
constexpr int POSITION_BIT_COUNT = 5;
constexpr int NUM_CODES = 1 << POSITION_BIT_COUNT;
constexpr int32_t POSITION_BITS = NUM_CODES - 1;
constexpr int NUM_NEIGHBORS = 26;

// Encodes a foreground logit as one byte, in steps of 1/16 from -8 to 8.
template <typename Score> inline uint8_t code_of(const Score *score) {
  return static_cast<uint8_t>(std::min(std::max(0.0f, load_one(score) * 16 + 128.5f), 255.0f));
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

// Position codes of neighbors differ, so a pair of codes determines the step from a voxel to its neighbor.
class Steps {
public:
  Steps(int64_t plane, int64_t width) {
    for (int from = 0; from < NUM_CODES; ++from)
      for (int to = 0; to < NUM_CODES; ++to)
        steps_[from << POSITION_BIT_COUNT | to] =
            static_cast<int32_t>(along(from, to, 9) * plane + along(from, to, 3) * width + along(from, to, 1));
  }
  int32_t between(int32_t key, int32_t neighbor) const {
    return steps_[(key & POSITION_BITS) << POSITION_BIT_COUNT | (neighbor & POSITION_BITS)];
  }

private:
  static int64_t along(int from, int to, int weight) { return (to / weight % 3 - from / weight % 3 + 4) % 3 - 1; }
  std::array<int32_t, NUM_CODES * NUM_CODES> steps_;
};

inline int32_t highest_of(int32_t a, int32_t b, int32_t c) { return std::max(std::max(a, b), c); }

// Writes for each voxel of one plane the highest key of the voxel and its 8 neighbors in the plane. Skips the padding.
void max_filter_plane(const int32_t *keys, int64_t size, int64_t width, int32_t *along_x, int32_t *highest) {
  for (int64_t i = 1; i < size - 1; ++i)
    along_x[i] = highest_of(keys[i - 1], keys[i], keys[i + 1]);
  for (int64_t i = width + 1; i < size - width - 1; ++i)
    highest[i] = highest_of(along_x[i - width], along_x[i], along_x[i + width]);
}

// Indices or lengths along (z, y, x).
using Index = std::array<int64_t, 3>;

// The voxels from `first` up to, but not including, `end`.
struct Box {
  Index first, end;
  int64_t length(int axis) const { return end[axis] - first[axis]; }
  bool contains(const Index &voxel) const {
    for (int axis = 0; axis < 3; ++axis)
      if (voxel[axis] < first[axis] || voxel[axis] >= end[axis])
        return false;
    return true;
  }
  // Returns the offset of a voxel in an array of the values in this box.
  int64_t offset(const Index &voxel) const {
    return ((voxel[0] - first[0]) * length(1) + voxel[1] - first[1]) * length(2) + voxel[2] - first[2];
  }
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

// Heights and foreground scores of the voxels of a box, with arbitrary strides except along x, where it is 1.
struct Scores {
  const void *heights, *foreground;
  Index height_strides, foreground_strides;
  Index first;         // first voxel of the box
  int64_t is_bfloat16; // float32 otherwise

  // Writes the keys and score codes of `count` voxels from `voxel` along x. Voxels up to the threshold are background.
  void write_row(const Index &voxel, int64_t count, float threshold, int32_t *keys, uint8_t *codes) const {
    if (is_bfloat16)
      write<Bfloat16>(voxel, count, threshold, keys, codes);
    else
      write<float>(voxel, count, threshold, keys, codes);
  }

private:
  template <typename Score>
  void write(const Index &voxel, int64_t count, float threshold, int32_t *__restrict keys, uint8_t *__restrict codes) const {
    const Score *height = static_cast<const Score *>(heights), *score = static_cast<const Score *>(foreground);
    for (int axis = 0; axis < 3; ++axis) {
      height += (voxel[axis] - first[axis]) * height_strides[axis];
      score += (voxel[axis] - first[axis]) * foreground_strides[axis];
    }
    const int32_t row_code = static_cast<int32_t>(9 * ((voxel[0] + 1) % 3) + 3 * ((voxel[1] + 1) % 3));
    const int32_t first_digit = static_cast<int32_t>((voxel[2] + 1) % 3);
    for (int32_t x = 0; x < static_cast<int32_t>(count); ++x) {
      const int32_t key = key_of(load_one(height + x)) + row_code + (first_digit + x) % 3;
      keys[x] = load_one(score + x) > threshold ? key : BACKGROUND_KEY;
    }
    for (int64_t x = 0; x < count; ++x)
      codes[x] = code_of(score + x);
  }
};

} // namespace
