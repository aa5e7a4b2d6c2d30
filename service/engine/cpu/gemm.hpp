// Division of matrix products into tiles whose sums fit in registers, and activations.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int TILE_VECTORS = 24; // vectors of sums in a register tile; the other registers hold weights and one input
#elif defined(__AVX2__)
constexpr int LANES = 8;
constexpr int TILE_VECTORS = 12;
#else
constexpr int LANES = 4;
constexpr int TILE_VECTORS = 12;
#endif

// Returns the number of vectors needed to hold the columns.
inline int64_t count_vectors(int64_t columns) { return (columns + LANES - 1) / LANES; }

// Returns the width, in vectors, of the next block of columns if `left` vectors are left. Blocks of 3 read the rows
// fewer times than blocks of 2. Blocks of one vector use only half of the registers for sums, so they are avoided.
inline int next_block_vectors(int64_t left) { return left % 3 == 0 || left == 5 ? 3 : left == 1 ? 1 : 2; }

// Returns the number of rows in a register tile that is `vectors` wide.
constexpr int64_t tile_rows(int vectors) { return TILE_VECTORS / std::max(vectors, 2); }

// Calls f with `value`, from 1 to MAX, as a compile-time constant.
template <int MAX, class F> inline void with_constant(int64_t value, F f) {
  if constexpr (MAX > 0) {
    if (value == MAX)
      f(std::integral_constant<int, MAX>{});
    else
      with_constant<MAX - 1>(value, f);
  }
}

// Calls f for each register tile with its height, as a compile-time constant, and its first row. All tiles have about
// the same height, because a tile of one or two rows takes as long as a tile of four rows.
template <int V, class F> inline void for_each_tile(int64_t rows, F f) {
  int64_t first_row = 0;
  for (int64_t tiles_left = (rows + tile_rows(V) - 1) / tile_rows(V); tiles_left > 0; --tiles_left) {
    const int64_t tile_height = (rows - first_row + tiles_left - 1) / tiles_left;
    with_constant<tile_rows(V)>(tile_height, [&](auto height) { f(height, first_row); });
    first_row += tile_height;
  }
}

// Activations. Comparisons are written so that NaN stays NaN, because non-finite scores must remain detectable.
struct Identity {
  template <class V> V operator()(V value) const { return value; }
};
struct Relu {
  template <class V> V operator()(V value) const { return value < 0.0f ? V{} : value; }
};
struct LeakyRelu {
  float slope;
  template <class V> V operator()(V value) const { return value < 0.0f ? slope * value : value; }
};

} // namespace
