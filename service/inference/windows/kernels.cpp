// Counting pixels, cutting windows out of images and blending their scores, one pass each. `service/inference/windows/blending.py` and
// `service/inference/normalize.py` say what is computed, and compute the same with torch and NumPy.
//
// What is cut and what comes from a network may have any strides, counted in elements; buffers of sums lie densely.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>
#ifdef __AVX__
#include <immintrin.h>
#endif

#include "../../engine/cpu/simd.hpp"

namespace {

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

template <typename T> inline float widened(T value) { return static_cast<float>(value); }

// A part of a line is too short for the processor to see by itself where the next ones will be: so many lines ahead, they
// are asked for.
constexpr int64_t AHEAD = 16;
constexpr int64_t AHEAD_IN_ROWS = 8;
constexpr uintptr_t CACHE_LINE = 64;

template <bool ToWrite, typename T> inline void fetch(const T *from, int64_t count) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(from), end = begin + count * sizeof(T);
  for (uintptr_t line = begin & -CACHE_LINE; line < end; line += CACHE_LINE)
    __builtin_prefetch(reinterpret_cast<const void *>(line), ToWrite);
}

// The line that comes so many lines after line y of plane z; false where there is none.
inline bool step_ahead(int64_t ahead, int64_t depth, int64_t height, int64_t &z, int64_t &y) {
  y += ahead;
  if (y >= height) y -= height, ++z;
  return z < depth && y < height;
}

// Calls work(part) for so many parts, each in a thread of its own; a single one without the ado that OpenMP makes of it,
// which is long where a network has emptied the caches.
template <typename Work> void in_parts(int parts, Work work) {
  if (parts == 1) return work(0);
#pragma omp parallel for num_threads(parts)
  for (int part = 0; part < parts; ++part)
    work(part);
}

// Counted apart, and then together before a count could need more than 32 bits.
constexpr int64_t APART = 4;
constexpr int64_t COUNTED = int64_t(1) << 30;

struct Scaling {
  float offset, scale, lowest, highest;
};

template <typename Pixel, typename Out>
void cut_line(const Pixel *from, int64_t from_step, Out *out, int64_t out_step, int64_t count, Scaling s) {
  for (int64_t x = 0; x < count; ++x) {
    float value = (widened(from[x * from_step]) - s.offset) / s.scale;
    value = value < s.lowest ? s.lowest : value;
    store_one(out + x * out_step, value > s.highest ? s.highest : value);
  }
}

// Of what is cut: its edges along z, y and x, the bytes from pixel to pixel along each, and the elements in what is written.
struct Box {
  int64_t size[3], bytes[3], steps[3];

  template <typename Pixel> const Pixel *line(const Pixel *pixels, int64_t z, int64_t y) const {
    return pixels + (z * bytes[0] + y * bytes[1]) / int64_t(sizeof(Pixel));
  }
};

template <typename Pixel, typename Out> void cut(const Pixel *pixels, Out *out, const Box &box, Scaling s, int threads) {
  const int64_t depth = box.size[0], height = box.size[1], across = box.size[2];
  const int64_t step = box.bytes[2] / int64_t(sizeof(Pixel));
  in_parts(threads, [&](int part) {
    for (int64_t z = depth * part / threads; z < depth * (part + 1) / threads; ++z)
      for (int64_t y = 0; y < height; ++y) {
        int64_t later_z = z, later_y = y;
        if (step_ahead(AHEAD, depth, height, later_z, later_y)) fetch<false>(box.line(pixels, later_z, later_y), across * step);
        Out *const to = out + z * box.steps[0] + y * box.steps[1];
        if (step == 1 && box.steps[2] == 1)
          cut_line(box.line(pixels, z, y), 1, to, 1, across, s);
        else
          cut_line(box.line(pixels, z, y), step, to, box.steps[2], across, s);
      }
  });
}

template <typename Pixel>
void cut_into(const void *pixels, void *out, int32_t narrow, const Box &box, Scaling s, int threads) {
  const Pixel *const from = static_cast<const Pixel *>(pixels);
  if (narrow)
    cut(from, static_cast<Bfloat16 *>(out), box, s, threads);
  else
    cut(from, static_cast<float *>(out), box, s, threads);
}

// Floats that the processor takes at a time. The compiler makes little of wider vectors.
#if defined(__AVX512F__)
constexpr int WIDE = 16;
#elif defined(__AVX__)
constexpr int WIDE = 8;
#else
constexpr int WIDE = 4;
#endif
template <int N> using Width = std::integral_constant<int, N>;

// Calls work(width, x) for all of begin to end, so many at a time as there are blocks.
template <typename Work> inline void in_blocks(int64_t begin, int64_t end, Work work) {
  for (; begin + WIDE <= end; begin += WIDE)
    work(Width<WIDE>{}, begin);
  for (; begin + 4 <= end; begin += 4)
    work(Width<4>{}, begin);
  for (; begin < end; ++begin)
    work(Width<1>{}, begin);
}

// Writes what this core will not see again: a whole line of the cache goes to memory without being read from there before.
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

// Along one axis: where windows begin, and how long they are.
struct Axis {
  const int64_t *starts;
  int64_t count, edge;

  // From the window before to this one; of the first, beyond its end.
  int64_t step_to(int64_t window) const { return window ? starts[window] - starts[window - 1] : edge; }
  // First voxels of a window that the one before reaches, and those that the one behind does not.
  int64_t known(int64_t window) const { return edge - step_to(window); }
  int64_t leaving(int64_t window) const { return window + 1 < count ? step_to(window + 1) : edge; }
};

// Of all windows: how many outputs they have, where they lie, most planes and rows that two of them share, and how long the
// volume is along x.
struct Windows {
  int64_t outputs;
  Axis z, y, x;
  int64_t shared_planes, shared_rows, width;
};

// Importance is the product of three vectors, but at least so much; of so many voxels beyond the edge along x, as blocks
// reach some of them, both are zero.
constexpr int BEYOND = 16;
struct Importance {
  const float *z, *y, *x, *least;
};

// Weights of lines of a window.
class Weights {
public:
  Weights(const Windows &windows, const Importance &importance, const int64_t *at)
      : windows_(windows), importance_(importance), at_(at), own_(windows.x.edge), all_(windows.x.edge) {}

  // Of one line: its own, and those of all windows over the voxels that leave, as none behind this one reaches these.
  void weigh(int64_t z, int64_t y) {
    const float weight = importance_.z[z] * importance_.y[y];
    in_blocks(0, windows_.x.edge, [&](auto width, int64_t x) { store<width>(&own_[x], weighted(width, weight, x)); });
  }

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

// The scores of a line side by side: where they are, or else put into `room`.
template <typename Score> inline const Score *dense(const Score *scores, int64_t step, int64_t count, Score *room) {
  const auto gather = [&](auto known_step) {
    for (int64_t x = 0; x < count; ++x)
      room[x] = scores[x * known_step];
    return room;
  };
  switch (step) {
  case 1:
    return scores;
  // Channels last, with few channels.
  case 2:
    return gather(std::integral_constant<int64_t, 2>{});
  case 3:
    return gather(std::integral_constant<int64_t, 3>{});
  case 4:
    return gather(std::integral_constant<int64_t, 4>{});
  default:
    return gather(step);
  }
}

// Where a line of sums goes that no later window along x reaches, and what is added to it; null for nowhere and nothing.
struct Way {
  const float *above, *below;
  float *kept, *means;
};

// Takes in one window; returns whether all that leaves is finite.
//
// Of what it has in common with the window before along x the sums lie in `beside`, and those for the one behind go to
// `aside`. What no later window along x reaches goes on to `rows`, for the row behind, unless that does not reach it, and then
// to `layer`, or if it is final to `means`; what lies there of the row and of the layer before is added.
//
// first_row, end_row  of those that leave: its part are these, and those whole multiples of all that leave below. Sums go
//                     from one of these rows to another one of them, and there when that was read.
template <typename Score>
bool blend(const Score *scores, const int64_t *steps, const Windows &w, const int64_t *at, const Importance &importance,
           const float *beside, float *aside, float *rows, float *layer, float *means, int64_t first_row, int64_t end_row) {
  const int64_t depth = w.z.edge, height = w.y.edge, across = w.x.edge;
  const int64_t top = w.y.starts[at[1]], left = w.x.starts[at[2]];
  const int64_t reached_planes = w.z.known(at[0]), final_planes = w.z.leaving(at[0]);
  const int64_t reached_rows = w.y.known(at[1]), leaving_rows = w.y.leaving(at[1]);
  const int64_t known = w.x.known(at[2]), leaving = w.x.leaving(at[2]), staying = across - leaving;
  // What windows one behind another along y, and along z, hand on to each other lies together.
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
            // Nothing where it is finite, else NaN.
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
  _mm_sfence(); // What was passed on is there before others are told of it.
#endif
  for (int i = 0; i < WIDE; ++i)
    if (not_finite[i] != 0) return false;
  return true;
}

constexpr int32_t INFINITE = 0x7F800000;

} // namespace

extern "C" {

// pixels [z, y, x] -> out [z, y, x]: minus offset, by scale, within the limits.
//
// kind    of the pixels: 0 uint8, 1 int8, 2 uint16, 3 int16, 4 float32
// narrow  out is bfloat16, else float32
void stackseg_scale(const void *pixels, int32_t kind, void *out, int32_t narrow, const Box *box, float offset, float scale,
                  float lowest, float highest, int32_t threads) {
  const Scaling s{offset, scale, lowest, highest};
  switch (kind) {
  case 0:
    return cut_into<uint8_t>(pixels, out, narrow, *box, s, threads);
  case 1:
    return cut_into<int8_t>(pixels, out, narrow, *box, s, threads);
  case 2:
    return cut_into<uint16_t>(pixels, out, narrow, *box, s, threads);
  case 3:
    return cut_into<int16_t>(pixels, out, narrow, *box, s, threads);
  default:
    return cut_into<float>(pixels, out, narrow, *box, s, threads);
  }
}

// Counts how often each value occurs; gives the highest value and one more, so many counts being written.
//
// scratch  [4, 65536]
// counts   [65536]
int64_t stackseg_count(const uint16_t *values, int64_t size, uint32_t *scratch, int64_t *counts) {
  uint16_t highest = 0;
  for (int64_t i = 0; i < size; ++i)
    highest = std::max(highest, values[i]);
  const int64_t length = highest + int64_t(1);
  std::fill(counts, counts + length, 0);
  for (int64_t begin = 0; begin < size; begin += COUNTED) {
    const int64_t end = std::min(begin + COUNTED, size);
    std::fill(scratch, scratch + APART * length, 0);
    // Neighbours are often alike, and a count that was just written would be waited for.
    int64_t i = begin;
    for (; i + APART <= end; i += APART)
      for (int64_t k = 0; k < APART; ++k)
        ++scratch[k * length + values[i + k]];
    for (; i < end; ++i)
      ++scratch[values[i]];
    for (int64_t k = 0; k < APART; ++k)
      for (int64_t value = 0; value < length; ++value)
        counts[value] += scratch[k * length + value];
  }
  return length;
}

// Of what was counted, the value that would have this rank, from 0, if all were sorted; how many are less goes to `below`.
int64_t stackseg_rank(const int64_t *counts, int64_t length, int64_t rank, int64_t *below) {
  int64_t value = 0, less = 0;
  while (value < length && less + counts[value] <= rank)
    less += counts[value++];
  *below = less;
  return value;
}

// Takes in the scores of one window; what no later one reaches leaves.
//
// scores   [outputs, depth, height, across], bfloat16 if `narrow`, else float32; `steps` between its elements
// shape    outputs, depth, height, across; how many windows there are along z, y and x; most planes and rows that two of
//          them share; width of the volume
// starts   of the windows along z, y and x, one after the other
// at       which of them this one's are
// weights  importance along z, y and x, and the least there is along x, one after the other, the last two with 16
//          zeros behind them
// kept     twice room for columns, of which one is read and the other one written where two windows share another number of
//          columns than the two before; for rows; and for planes
// means    [outputs, planes, rows, width], of which the columns that leave are written
//
// Returns 1 where a mean is not finite, else 0.
int32_t stackseg_blend(const void *scores, int32_t narrow, const int64_t *steps, const int64_t *shape,
                       const int64_t *starts, const int64_t *at, const float *weights, float *const *kept, float *means,
                       int32_t threads) {
  const int64_t *const edges = shape + 1, *const counts = shape + 4;
  const Windows w{shape[0],
                  {starts, counts[0], edges[0]},
                  {starts + counts[0], counts[1], edges[1]},
                  {starts + counts[0] + counts[1], counts[2], edges[2]},
                  shape[7], shape[8], shape[9]};
  const float *const along_x = weights + edges[0] + edges[1];
  const Importance importance{weights, weights + edges[0], along_x, along_x + edges[2] + BEYOND};
  // As long as windows share as much as the two before, a line of sums takes the place of another.
  int64_t beside = 0;
  for (int64_t n = 1; n <= at[2]; ++n)
    beside ^= w.x.known(n) != w.x.known(n - 1);
  const int64_t aside = beside ^ (w.x.known(at[2]) != w.x.edge - w.x.leaving(at[2]));
  const int64_t rows = w.y.leaving(at[1]);
  std::atomic<bool> failed{false};
  in_parts(threads, [&](int part) {
    const auto work = [&](const auto *typed) {
      return blend(typed, steps, w, at, importance, kept[beside], kept[aside], kept[2], kept[3], means,
                   rows * part / threads, rows * (part + 1) / threads);
    };
    if (!(narrow ? work(static_cast<const Bfloat16 *>(scores)) : work(static_cast<const float *>(scores)))) failed = true;
  });
  return failed;
}

// Whether all of so many scores are finite, bfloat16 if `narrow`, else float32.
int32_t stackseg_finite(const void *scores, int32_t narrow, int64_t count) {
  if (narrow) {
    const uint16_t *const bits = static_cast<const uint16_t *>(scores);
    uint16_t largest = 0;
    for (int64_t i = 0; i < count; ++i)
      largest = std::max(largest, static_cast<uint16_t>(bits[i] & INT16_MAX));
    return largest < INFINITE >> 16;
  }
  const float *const values = static_cast<const float *>(scores);
  int32_t largest = 0;
  for (int64_t i = 0; i < count; ++i)
    largest = std::max(largest, static_cast<int32_t>(bits_of(values[i]) & INT32_MAX));
  return largest < INFINITE;
}
}
