// Weighted means of the scores of overlapping windows, computed in one pass per window.
//
// Means are written with the last window that covers them, and sums are kept only where windows overlap. It is fast for
// these reasons: values stay in registers from the scores to the means, in the processor's widest vectors (`in_blocks`).
// All sums that a window needs are contiguous, in the order in which they are read. Means bypass the caches, because no
// later window reads them. Summed weights are recomputed, which takes less time than reading stored ones.

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

// Floats per vector register. The compiler generates poor code for wider vectors.
#if defined(__AVX512F__)
constexpr int WIDE = 16;
#elif defined(__AVX__)
constexpr int WIDE = 8;
#else
constexpr int WIDE = 4;
#endif
template <int N> using Width = std::integral_constant<int, N>;

// Calls work(width, x) for x from begin to end, in steps of the widest possible vectors.
template <typename Work> inline void in_blocks(int64_t begin, int64_t end, Work work) {
  for (; begin + WIDE <= end; begin += WIDE)
    work(Width<WIDE>{}, begin);
  for (; begin + 4 <= end; begin += 4)
    work(Width<4>{}, begin);
  for (; begin < end; ++begin)
    work(Width<1>{}, begin);
}

// Writes values that this core will not read again. Whole cache lines go to memory without being read first.
template <int N> inline void pass_on(float *to, Floats<N> values) {
  if (N == WIDE && reinterpret_cast<uintptr_t>(to) % sizeof values == 0) {
#if defined(__AVX512F__)
    if constexpr (N == 16) return _mm512_stream_ps(to, values);
#elif defined(__AVX__)
    if constexpr (N == 8) return _mm256_stream_ps(to, values);
#endif
  }
  store<N>(to, values);
}

// The windows along one axis: their starts and their size.
struct Axis {
  const int64_t *starts;
  int64_t count, edge;

  // Distance from the previous window to this one. For the first window, its size.
  int64_t step_to(int64_t window) const { return window ? starts[window] - starts[window - 1] : edge; }
  // Number of voxels at the start of a window that the previous window covers, and number that the next one does not cover.
  int64_t known(int64_t window) const { return edge - step_to(window); }
  int64_t leaving(int64_t window) const { return window + 1 < count ? step_to(window + 1) : edge; }
};

// All windows: the number of outputs, the positions, the largest overlap in planes and rows, and the size of the volume
// along x.
struct Windows {
  int64_t outputs;
  Axis z, y, x;
  int64_t shared_planes, shared_rows, width;
};

// The importance of a voxel is the product of three vectors, limited from below by `least`. `x` and `least` are followed by
// BEYOND zeros, because vectors may reach beyond the edge.
constexpr int BEYOND = 16;
struct Importance {
  const float *z, *y, *x, *least;
};

// Weights of the lines of a window.
class Weights {
public:
  Weights(const Windows &windows, const Importance &importance, const int64_t *at)
      : windows_(windows), importance_(importance), at_(at), own_(windows.x.edge), all_(windows.x.edge) {}

  // Computes the window's own weights of one line.
  void weigh(int64_t z, int64_t y) {
    const float weight = importance_.z[z] * importance_.y[y];
    in_blocks(0, windows_.x.edge, [&](auto width, int64_t x) { store<width>(&own_[x], weighted(width, weight, x)); });
  }

  // Computes the sum of the weights of all windows, for the first voxels of a line, which no later window covers.
  void add_up(int64_t in_z, int64_t in_y, int64_t leaving) {
    lines_.clear();
    for (int64_t i = at_[0], z = in_z; z < windows_.z.edge; z += windows_.z.step_to(i--))
      for (int64_t j = at_[1], y = in_y; y < windows_.y.edge; y += windows_.y.step_to(j--))
        lines_.push_back(importance_.z[z] * importance_.y[y]);
    in_blocks(0, leaving, [&](auto width, int64_t x) {
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

// Returns the scores of a line as contiguous memory: the original if it is contiguous, otherwise a copy in `room`.
template <typename Score> inline const Score *dense(const Score *scores, int64_t step, int64_t count, Score *room) {
  const auto gather = [&](auto known_step) {
    for (int64_t x = 0; x < count; ++x)
      room[x] = scores[x * known_step];
    return room;
  };
  if (step == 1) return scores;
  // Channels last with few channels.
  if (step == 2) return gather(std::integral_constant<int64_t, 2>{});
  if (step == 3) return gather(std::integral_constant<int64_t, 3>{});
  if (step == 4) return gather(std::integral_constant<int64_t, 4>{});
  return gather(step);
}

// The destination of a line of sums that no later window along x covers, and the sums to add to it. Null if not used.
struct Way {
  const float *above, *below;
  float *kept, *means;
};

// Adds the scores of one window. Returns whether all means that it completes are finite.
//
// `beside` holds the sums where this window overlaps the previous one along x. The sums for the next window along x are
// written to `aside`. Sums that no later window along x covers are written to `rows` if the next row of windows covers
// them, otherwise to `layer` if the next layer does, and otherwise, divided by the weights, to `means`. The sums of the
// previous row and the previous layer in these buffers are added first.
//
// first_row, end_row  the part of the leaving rows that this call processes, together with the rows at multiples of the
//                     number of leaving rows below them. Sums are passed on only between these rows, after they were read.
template <typename Score>
bool blend(const Score *scores, const int64_t *steps, const Windows &w, const int64_t *at, const Importance &importance,
           const float *beside, float *aside, float *rows, float *layer, float *means, int64_t first_row, int64_t end_row) {
  const int64_t depth = w.z.edge, height = w.y.edge, across = w.x.edge;
  const int64_t top = w.y.starts[at[1]], left = w.x.starts[at[2]];
  const int64_t reached_planes = w.z.known(at[0]), final_planes = w.z.leaving(at[0]);
  const int64_t reached_rows = w.y.known(at[1]), leaving_rows = w.y.leaving(at[1]);
  const int64_t known = w.x.known(at[2]), leaving = w.x.leaving(at[2]), staying = across - leaving;
  // Sums that are passed on to the next window along y, and along z, are contiguous.
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
          Way way{y < reached_rows ? row : nullptr, nullptr, nullptr, nullptr};
          if (!leaves)
            way.kept = row - leaving_rows * w.outputs * leaving;
          else {
            if (z < reached_planes) way.below = plane;
            if (final)
              way.means = means + ((k * final_planes + z) * leaving_rows + y) * w.width + left;
            else
              way.kept = plane - final_planes * leaving_rows * w.outputs * leaving;
          }
          if (way.above) fetch<true>(row + AHEAD_IN_ROWS * w.outputs * leaving, leaving);
          const auto own = [&](auto width, int64_t x) { return load<width>(weights.own() + x) * load<width>(line + x); };
          const auto both = [&](auto width, int64_t x) { return own(width, x) + load<width>(sums + x); };
          const auto leave = [&](auto width, int64_t x, auto sum) {
            if (way.above) sum += load<width>(way.above + x);
            if (way.below) sum += load<width>(way.below + x);
            if (way.kept) return store<width>(way.kept + x, sum);
            const auto mean = sum / load<width>(weights.all() + x);
            pass_on<width>(way.means + x, mean);
            // Adds 0 if the mean is finite, otherwise NaN.
            if constexpr (width == WIDE)
              not_finite += mean * 0;
            else
              for (int i = 0; i < width; ++i)
                not_finite[i] += mean[i] * 0;
          };
          in_blocks(0, std::min(known, leaving), [&](auto width, int64_t x) { leave(width, x, both(width, x)); });
          in_blocks(known, leaving, [&](auto width, int64_t x) { leave(width, x, own(width, x)); });
          in_blocks(leaving, known, [&](auto width, int64_t x) { store<width>(next + x, both(width, x)); });
          in_blocks(std::max(known, leaving), across, [&](auto width, int64_t x) { store<width>(next + x, own(width, x)); });
        }
      }
#ifdef __AVX__
  _mm_sfence(); // Make the streamed writes visible before other threads are notified.
#endif
  for (int i = 0; i < WIDE; ++i)
    if (not_finite[i] != 0) return false;
  return true;
}

} // namespace
