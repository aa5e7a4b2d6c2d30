// Weighted means of the scores of overlapping windows, computed in one pass per window.
//
// A mean is written by the last window that covers its voxel. Sums are stored only for voxels that two windows share. Several
// properties make this fast: Values stay in vector registers from the scores to the means (`for_each_block`). All sums that a
// window needs are contiguous, in the order in which they are read. Means bypass the caches, because no later window reads
// them. Each line of summed weights is computed twice, which is faster than reading it.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>
#ifdef __AVX__
#include <immintrin.h>
#endif

#include "../../engine/cpu/simd.hpp"
#include "prefetch.hpp"

namespace {

// Number of floats per vector register of the processor. Compilers generate poor code for wider vectors.
#if defined(__AVX512F__)
constexpr int VECTOR_FLOATS = 16;
#elif defined(__AVX__)
constexpr int VECTOR_FLOATS = 8;
#else
constexpr int VECTOR_FLOATS = 4;
#endif
template <int N> using Width = std::integral_constant<int, N>;

// Calls work(width, x) for all x from begin to end, with as many elements at a time as fit in a vector.
template <typename Work> inline void for_each_block(int64_t begin, int64_t end, Work work) {
  for (; begin + VECTOR_FLOATS <= end; begin += VECTOR_FLOATS)
    work(Width<VECTOR_FLOATS>{}, begin);
  for (; begin + 4 <= end; begin += 4)
    work(Width<4>{}, begin);
  for (; begin < end; ++begin)
    work(Width<1>{}, begin);
}

// Stores values that this core does not read again. Whole cache lines are written to memory without being read first.
template <int N> inline void stream_store(float *target, Floats<N> values) {
  if (N == VECTOR_FLOATS && reinterpret_cast<uintptr_t>(target) % sizeof values == 0) {
#if defined(__AVX512F__)
    if constexpr (N == 16) return _mm512_stream_ps(target, values);
#elif defined(__AVX__)
    if constexpr (N == 8) return _mm256_stream_ps(target, values);
#endif
  }
  store<N>(target, values);
}

// Starts and length of the windows along one axis.
struct Axis {
  const int64_t *starts;
  int64_t count, length;

  // Distance from the previous window or, for the first window, its length.
  int64_t step_to(int64_t window) const { return window ? starts[window] - starts[window - 1] : length; }
  // Number of leading voxels that the previous window also covers.
  int64_t num_shared(int64_t window) const { return length - step_to(window); }
  // Number of leading voxels that the next window does not cover.
  int64_t num_final(int64_t window) const { return window + 1 < count ? step_to(window + 1) : length; }
};

// Number of outputs, positions of all windows, maximum number of planes and rows that two windows share, and width of the
// volume along x.
struct Windows {
  int64_t num_outputs;
  Axis z, y, x;
  int64_t max_shared_planes, max_shared_rows, volume_width;
};

// Number of zeros after the weights and the minimum weights along x, because vector loads may read past the last weight.
constexpr int WEIGHT_PADDING = 16;

// Weights along z, y and x. The weight of a voxel is their product, but at least `min_weight`.
struct Importance {
  const float *z, *y, *x, *min_weight;
};

// Weights of the lines of a window.
class LineWeights {
public:
  LineWeights(const Windows &windows, const Importance &importance, const int64_t *index)
      : windows_(windows), importance_(importance), index_(index), own_weights_(windows.x.length),
        weight_sums_(windows.x.length) {}

  // Computes the weights of one line of this window.
  void compute_own_weights(int64_t z, int64_t y) {
    const float weight = importance_.z[z] * importance_.y[y];
    for_each_block(0, windows_.x.length,
                   [&](auto width, int64_t x) { store<width>(&own_weights_[x], compute_weight(width, weight, x)); });
  }

  // Sums the weights of all windows that cover a voxel, for each voxel of a line that this window completes.
  void compute_weight_sums(int64_t line_z, int64_t line_y, int64_t num_final) {
    line_weights_.clear();
    for (int64_t i = index_[0], z = line_z; z < windows_.z.length; z += windows_.z.step_to(i--))
      for (int64_t j = index_[1], y = line_y; y < windows_.y.length; y += windows_.y.step_to(j--))
        line_weights_.push_back(importance_.z[z] * importance_.y[y]);
    for_each_block(0, num_final, [&](auto width, int64_t x) {
      Floats<width> sum = {};
      for (int64_t n = index_[2], position = x; position < windows_.x.length; position += windows_.x.step_to(n--))
        for (const float weight : line_weights_)
          sum += compute_weight(width, weight, position);
      store<width>(&weight_sums_[x], sum);
    });
  }

  const float *own_weights() const { return own_weights_.data(); }
  const float *weight_sums() const { return weight_sums_.data(); }

private:
  template <typename Width> auto compute_weight(Width width, float weight, int64_t x) const {
    const auto product = load<width>(importance_.x + x) * weight;
    const auto min_weight = load<width>(importance_.min_weight + x);
    return product > min_weight ? product : min_weight;
  }

  const Windows &windows_;
  const Importance &importance_;
  const int64_t *const index_;
  std::vector<float> own_weights_, weight_sums_, line_weights_;
};

// Returns the scores of a line as a contiguous array. They are copied to `buffer` if necessary.
template <typename Score>
inline const Score *make_contiguous(const Score *scores, int64_t step, int64_t count, Score *buffer) {
  const auto copy = [&](auto fixed_step) {
    for (int64_t x = 0; x < count; ++x)
      buffer[x] = scores[x * fixed_step];
    return buffer;
  };
  if (step == 1) return scores;
  // The memory format is channels last, with few channels.
  if (step == 2) return copy(std::integral_constant<int64_t, 2>{});
  if (step == 3) return copy(std::integral_constant<int64_t, 3>{});
  if (step == 4) return copy(std::integral_constant<int64_t, 4>{});
  return copy(step);
}

// Pointers for a line of voxels that no later window along x covers: the sums of the previous row and layer, which are added
// to the line, and the sums or means to which the result is written. Null pointers are skipped.
struct LineTarget {
  const float *previous_row, *previous_layer;
  float *sums, *means;
};

// Adds one window; returns whether all completed means are finite.
//
// `left_sums` contains the sums of the columns that this window shares with the previous window along x. The sums of the
// columns that it shares with the next window are written to `right_sums`. The other columns are written to `row_sums` if the
// next row of windows covers them, to `layer_sums` if only the next layer covers them, and otherwise, because they are final,
// to `means`. The sums of the previous row and layer at these voxels are added first.
//
// first_row, end_row  range of final rows to process. Rows whose distance is a multiple of the number of final rows are
//                     processed together, because sums are moved only between such rows, and only after the sums at the
//                     target row have been read.
template <typename Score>
bool blend(const Score *scores, const int64_t *steps, const Windows &windows, const int64_t *index,
           const Importance &importance, const float *left_sums, float *right_sums, float *row_sums, float *layer_sums,
           float *means, int64_t first_row, int64_t end_row) {
  const int64_t depth = windows.z.length, height = windows.y.length, window_width = windows.x.length;
  const int64_t top = windows.y.starts[index[1]], left = windows.x.starts[index[2]];
  const int64_t shared_planes = windows.z.num_shared(index[0]), final_planes = windows.z.num_final(index[0]);
  const int64_t shared_rows = windows.y.num_shared(index[1]), final_rows = windows.y.num_final(index[1]);
  const int64_t shared_columns = windows.x.num_shared(index[2]), final_columns = windows.x.num_final(index[2]);
  const int64_t remaining_columns = window_width - final_columns;
  // The sums that windows pass on to each other along y, and along z, are contiguous.
  row_sums += left * windows.num_outputs * depth * windows.max_shared_rows;
  layer_sums += (top * windows.volume_width + final_rows * left) * windows.num_outputs * windows.max_shared_planes;
  std::vector<Score> buffer(window_width);
  LineWeights weights(windows, importance, index);
  Floats<VECTOR_FLOATS> nonfinite_sums = {};
  for (int64_t z = 0; z < depth; ++z)
    for (int64_t first_of_group = 0; first_of_group < height; first_of_group += final_rows)
      for (int64_t y = first_of_group + first_row; y < std::min(first_of_group + end_row, height); ++y) {
        const bool is_final_row = y < final_rows, is_final = is_final_row && z < final_planes;
        weights.compute_own_weights(z, y);
        if (is_final) weights.compute_weight_sums(z, y, final_columns);
        for (int64_t k = 0; k < windows.num_outputs; ++k) {
          const Score *const line =
              make_contiguous(scores + k * steps[0] + z * steps[1] + y * steps[2], steps[3], window_width, buffer.data());
          const int64_t line_index = (z * height + y) * windows.num_outputs + k;
          const float *const left_line = left_sums + line_index * shared_columns;
          float *const right_line = right_sums + line_index * remaining_columns - final_columns;
          float *const row_line = row_sums + ((z * windows.max_shared_rows + y) * windows.num_outputs + k) * final_columns;
          float *const layer_line = layer_sums + ((z * final_rows + y) * windows.num_outputs + k) * final_columns;
          LineTarget target{y < shared_rows ? row_line : nullptr, nullptr, nullptr, nullptr};
          if (!is_final_row)
            target.sums = row_line - final_rows * windows.num_outputs * final_columns;
          else {
            if (z < shared_planes) target.previous_layer = layer_line;
            if (is_final)
              target.means = means + ((k * final_planes + z) * final_rows + y) * windows.volume_width + left;
            else
              target.sums = layer_line - final_planes * final_rows * windows.num_outputs * final_columns;
          }
          if (target.previous_row)
            prefetch<true>(row_line + ROW_SUMS_PREFETCH_DISTANCE * windows.num_outputs * final_columns, final_columns);
          const auto weight_score = [&](auto width, int64_t x) {
            return load<width>(weights.own_weights() + x) * load<width>(line + x);
          };
          const auto add_left_sum = [&](auto width, int64_t x) {
            return weight_score(width, x) + load<width>(left_line + x);
          };
          const auto write = [&](auto width, int64_t x, auto sum) {
            if (target.previous_row) sum += load<width>(target.previous_row + x);
            if (target.previous_layer) sum += load<width>(target.previous_layer + x);
            if (target.sums) return store<width>(target.sums + x, sum);
            const auto mean = sum / load<width>(weights.weight_sums() + x);
            stream_store<width>(target.means + x, mean);
            // Adds 0 if the mean is finite, else NaN.
            if constexpr (width == VECTOR_FLOATS)
              nonfinite_sums += mean * 0;
            else
              for (int i = 0; i < width; ++i)
                nonfinite_sums[i] += mean[i] * 0;
          };
          for_each_block(0, std::min(shared_columns, final_columns),
                         [&](auto width, int64_t x) { write(width, x, add_left_sum(width, x)); });
          for_each_block(shared_columns, final_columns,
                         [&](auto width, int64_t x) { write(width, x, weight_score(width, x)); });
          for_each_block(final_columns, shared_columns,
                         [&](auto width, int64_t x) { store<width>(right_line + x, add_left_sum(width, x)); });
          for_each_block(std::max(shared_columns, final_columns), window_width,
                         [&](auto width, int64_t x) { store<width>(right_line + x, weight_score(width, x)); });
        }
      }
#ifdef __AVX__
  _mm_sfence(); // Complete the streaming stores before other threads read the means.
#endif
  for (int i = 0; i < VECTOR_FLOATS; ++i)
    if (nonfinite_sums[i] != 0) return false;
  return true;
}

} // namespace
