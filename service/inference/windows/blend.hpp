// Weighted means of the scores of overlapping windows, computed in one pass per window.
//
// A mean is written by the last window that covers its voxel. Sums are kept only for voxels that two windows share. Several
// properties make this fast: vectors stay in registers from the scores to the means (`for_each_block`), and are as wide as
// those of the processor; all sums that a window needs are contiguous, in the order in which they are read; means bypass the
// caches, because no later window reads them; and a line of summed weights is computed twice, which is faster than reading it.

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

// Number of floats per vector of the processor. Compilers generate poor code for wider vectors.
#if defined(__AVX512F__)
constexpr int WIDE = 16;
#elif defined(__AVX__)
constexpr int WIDE = 8;
#else
constexpr int WIDE = 4;
#endif
template <int N> using Width = std::integral_constant<int, N>;

// Calls work(width, x) for all x from begin to end, with as many elements at a time as fit in a vector.
template <typename Work> inline void for_each_block(int64_t begin, int64_t end, Work work) {
  for (; begin + WIDE <= end; begin += WIDE)
    work(Width<WIDE>{}, begin);
  for (; begin + 4 <= end; begin += 4)
    work(Width<4>{}, begin);
  for (; begin < end; ++begin)
    work(Width<1>{}, begin);
}

// Stores values that this core does not read again. A whole cache line is written to memory without being read first.
template <int N> inline void stream_store(float *to, Floats<N> values) {
  if (N == WIDE && reinterpret_cast<uintptr_t>(to) % sizeof values == 0) {
#if defined(__AVX512F__)
    if constexpr (N == 16) return _mm512_stream_ps(to, values);
#elif defined(__AVX__)
    if constexpr (N == 8) return _mm256_stream_ps(to, values);
#endif
  }
  store<N>(to, values);
}

// Starts and length of the windows along one axis.
struct Axis {
  const int64_t *starts;
  int64_t count, edge;

  // Distance from the previous window; for the first window, its length.
  int64_t step_to(int64_t window) const { return window ? starts[window] - starts[window - 1] : edge; }
  // Number of leading voxels that the previous window also covers, and of those that the next window does not cover.
  int64_t known(int64_t window) const { return edge - step_to(window); }
  int64_t leaving(int64_t window) const { return window + 1 < count ? step_to(window + 1) : edge; }
};

// Number of outputs, positions of all windows, maximum number of planes and rows that two windows share, and width of the
// volume along x.
struct Windows {
  int64_t outputs;
  Axis z, y, x;
  int64_t shared_planes, shared_rows, width;
};

// Weights of a voxel along z, y and x, whose product is clipped to at least `least`. Along x, `x` and `least` are followed by
// this number of zeros, because vectors may read past the edge.
constexpr int WEIGHT_PADDING = 16;
struct Importance {
  const float *z, *y, *x, *least;
};

// Weights of the lines of a window.
class Weights {
public:
  Weights(const Windows &windows, const Importance &importance, const int64_t *at)
      : windows_(windows), importance_(importance), at_(at), own_(windows.x.edge), all_(windows.x.edge) {}

  // Computes the weights of one line of this window.
  void weigh(int64_t z, int64_t y) {
    const float weight = importance_.z[z] * importance_.y[y];
    for_each_block(0, windows_.x.edge, [&](auto width, int64_t x) { store<width>(&own_[x], weighted(width, weight, x)); });
  }

  // Computes the sums of the weights of all windows that cover the voxels of a line that this window completes.
  void add_up(int64_t in_z, int64_t in_y, int64_t leaving) {
    lines_.clear();
    for (int64_t i = at_[0], z = in_z; z < windows_.z.edge; z += windows_.z.step_to(i--))
      for (int64_t j = at_[1], y = in_y; y < windows_.y.edge; y += windows_.y.step_to(j--))
        lines_.push_back(importance_.z[z] * importance_.y[y]);
    for_each_block(0, leaving, [&](auto width, int64_t x) {
      Floats<width> sum = {};
      for (int64_t n = at_[2], place = x; place < windows_.x.edge; place += windows_.x.step_to(n--))
        for (const float weight : lines_)
          sum += weighted(width, weight, place);
      store<width>(&all_[x], sum);
    });
  }

  const float *own() const { return own_.data(); }
  const float *all() const { return all_.data(); }

private:
  template <typename Width> auto weighted(Width width, float weight, int64_t x) const {
    const auto product = load<width>(importance_.x + x) * weight, least = load<width>(importance_.least + x);
    return product > least ? product : least;
  }

  const Windows &windows_;
  const Importance &importance_;
  const int64_t *const at_;
  std::vector<float> own_, all_, lines_;
};

// Returns the scores of a line as a contiguous array, which is copied to `room` if necessary.
template <typename Score> inline const Score *dense(const Score *scores, int64_t step, int64_t count, Score *room) {
  const auto gather = [&](auto known_step) {
    for (int64_t x = 0; x < count; ++x)
      room[x] = scores[x * known_step];
    return room;
  };
  if (step == 1) return scores;
  // The memory format is channels last, with few channels.
  if (step == 2) return gather(std::integral_constant<int64_t, 2>{});
  if (step == 3) return gather(std::integral_constant<int64_t, 3>{});
  if (step == 4) return gather(std::integral_constant<int64_t, 4>{});
  return gather(step);
}

// Sums to add to a line that no later window along x covers, and where the line is written. Null pointers are skipped.
struct LineTarget {
  const float *above, *below;
  float *kept, *means;
};

// Adds one window; returns whether all completed means are finite.
//
// `beside` has the sums of the columns that this window shares with the previous one along x. The sums of the columns that it
// shares with the next one are written to `aside`. The other columns are written to `rows` if the next row of windows covers
// them, else to `layer` if the next layer covers them, else they are final and written to `means`. The sums of the previous
// row and layer at these voxels are added.
//
// first_row, end_row  part of the rows that this window completes: it processes these rows, and those at multiples of all
//                     completed rows below. Sums move only between rows of one part, and only after the target was read.
template <typename Score>
bool blend(const Score *scores, const int64_t *steps, const Windows &w, const int64_t *at, const Importance &importance,
           const float *beside, float *aside, float *rows, float *layer, float *means, int64_t first_row, int64_t end_row) {
  const int64_t depth = w.z.edge, height = w.y.edge, across = w.x.edge;
  const int64_t top = w.y.starts[at[1]], left = w.x.starts[at[2]];
  const int64_t reached_planes = w.z.known(at[0]), final_planes = w.z.leaving(at[0]);
  const int64_t reached_rows = w.y.known(at[1]), leaving_rows = w.y.leaving(at[1]);
  const int64_t known = w.x.known(at[2]), leaving = w.x.leaving(at[2]), staying = across - leaving;
  // The sums that windows pass on to each other along y, and along z, are contiguous.
  rows += left * w.outputs * depth * w.shared_rows;
  layer += (top * w.width + leaving_rows * left) * w.outputs * w.shared_planes;
  std::vector<Score> room(across);
  Weights weights(w, importance, at);
  Floats<WIDE> not_finite = {};
  for (int64_t z = 0; z < depth; ++z)
    for (int64_t base = 0; base < height; base += leaving_rows)
      for (int64_t y = base + first_row; y < std::min(base + end_row, height); ++y) {
        const bool leaves = y < leaving_rows, final = leaves && z < final_planes;
        weights.weigh(z, y);
        if (final) weights.add_up(z, y, leaving);
        for (int64_t k = 0; k < w.outputs; ++k) {
          const Score *const line =
              dense(scores + k * steps[0] + z * steps[1] + y * steps[2], steps[3], across, room.data());
          const int64_t place = (z * height + y) * w.outputs + k;
          const float *const sums = beside + place * known;
          float *const next = aside + place * staying - leaving;
          float *const row = rows + ((z * w.shared_rows + y) * w.outputs + k) * leaving;
          float *const plane = layer + ((z * leaving_rows + y) * w.outputs + k) * leaving;
          LineTarget target{y < reached_rows ? row : nullptr, nullptr, nullptr, nullptr};
          if (!leaves)
            target.kept = row - leaving_rows * w.outputs * leaving;
          else {
            if (z < reached_planes) target.below = plane;
            if (final)
              target.means = means + ((k * final_planes + z) * leaving_rows + y) * w.width + left;
            else
              target.kept = plane - final_planes * leaving_rows * w.outputs * leaving;
          }
          if (target.above) fetch<true>(row + AHEAD_IN_ROWS * w.outputs * leaving, leaving);
          const auto own = [&](auto width, int64_t x) { return load<width>(weights.own() + x) * load<width>(line + x); };
          const auto both = [&](auto width, int64_t x) { return own(width, x) + load<width>(sums + x); };
          const auto leave = [&](auto width, int64_t x, auto sum) {
            if (target.above) sum += load<width>(target.above + x);
            if (target.below) sum += load<width>(target.below + x);
            if (target.kept) return store<width>(target.kept + x, sum);
            const auto mean = sum / load<width>(weights.all() + x);
            stream_store<width>(target.means + x, mean);
            // Adds 0 if the mean is finite, else NaN.
            if constexpr (width == WIDE)
              not_finite += mean * 0;
            else
              for (int i = 0; i < width; ++i)
                not_finite[i] += mean[i] * 0;
          };
          for_each_block(0, std::min(known, leaving), [&](auto width, int64_t x) { leave(width, x, both(width, x)); });
          for_each_block(known, leaving, [&](auto width, int64_t x) { leave(width, x, own(width, x)); });
          for_each_block(leaving, known, [&](auto width, int64_t x) { store<width>(next + x, both(width, x)); });
          for_each_block(std::max(known, leaving), across,
                         [&](auto width, int64_t x) { store<width>(next + x, own(width, x)); });
        }
      }
#ifdef __AVX__
  _mm_sfence(); // Complete the streaming stores before other threads read the means.
#endif
  for (int i = 0; i < WIDE; ++i)
    if (not_finite[i] != 0) return false;
  return true;
}

} // namespace
