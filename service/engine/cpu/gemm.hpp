// Division of matrix products into tiles whose sums fit in registers, and activations.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int ROWS = 24; // vectors of sums in a register tile; the other registers hold weights and one input
#elif defined(__AVX2__)
constexpr int LANES = 8;
constexpr int ROWS = 12;
#else
constexpr int LANES = 4;
constexpr int ROWS = 12;
#endif

// Returns the number of vectors needed to hold the columns.
inline int64_t whole_vectors(int64_t columns) { return (columns + LANES - 1) / LANES; }

// Returns the width in vectors of the next block of columns, a good width for a tile, if `left` vectors are left.
inline int next_columns(int64_t left) { return left == 3 || left == 5 ? 3 : left == 1 ? 1 : 2; }

// Returns the number of rows of a register tile of this width.
constexpr int64_t tile_rows(int vectors) { return ROWS / std::max(vectors, 2); }

// Calls f with a number from 1 to MOST as a compile-time constant.
template <int MOST, class F> inline void with_constant(int64_t number, F f) {
  if constexpr (MOST > 0) {
    if (number == MOST)
      f(std::integral_constant<int, MOST>{});
    else
      with_constant<MOST - 1>(number, f);
  }
}

// Calls f with the height of each register tile, as a compile-time constant, and its first row. All tiles have about the
// same height, because a tile of one or two rows takes as long as one of four rows.
template <int V, class F> inline void each_tile(int64_t rows, F f) {
  int64_t first = 0;
  for (int64_t left = (rows + tile_rows(V) - 1) / tile_rows(V); left > 0; --left) {
    const int64_t count = (rows - first + left - 1) / left;
    with_constant<tile_rows(V)>(count, [&](auto height) { f(height, first); });
    first += count;
  }
}

// Activations. Comparisons are written so that NaN stays NaN, because non-finite scores must remain detectable.
struct Keep {
  template <class V> V operator()(V value) const { return value; }
};
struct Rectify {
  template <class V> V operator()(V value) const { return value < 0.0f ? V{} : value; }
};
struct Leak {
  float slope;
  template <class V> V operator()(V value) const { return value < 0.0f ? slope * value : value; }
};

} // namespace
