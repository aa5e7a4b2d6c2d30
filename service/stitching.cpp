// Counting pixels, cutting windows out of images and blending their scores, one pass each. `service/blending.py` and
// `service/preprocess.py` say what is computed, and compute the same with torch and NumPy.
//
// What is cut and what comes from a network may have any strides, counted in elements; buffers of sums lie densely.

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

struct BFloat16 {
  uint16_t bits;
};

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

template <typename T> inline float widened(T value) { return static_cast<float>(value); }

inline float widened(BFloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

inline void store(float value, float &out) { out = value; }

// To the nearest, of two that are as near to the even one; NaN stays NaN.
inline void store(float value, BFloat16 &out) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  out.bits = static_cast<uint16_t>(value != value ? 0x7FC0 : rounded);
}

// A part of a line is too short for the processor to see by itself where the next ones will be: so many lines ahead, they
// are asked for.
constexpr int64_t AHEAD = 16;
// Lines of sums are wider and are written: more of them at a time made it slower.
constexpr int64_t AHEAD_IN_SUMS = 4;
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
    store(value > s.highest ? s.highest : value, out[x * out_step]);
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
    cut(from, static_cast<BFloat16 *>(out), box, s, threads);
  else
    cut(from, static_cast<float *>(out), box, s, threads);
}

// Adds the first `known` weighted scores of a line to what is there, and puts the others where nothing was yet.
template <typename Score>
inline void add_line(const Score *__restrict scores, int64_t step, float weight, const float *__restrict along, float least,
                     int64_t known, int64_t count, float *__restrict sums) {
  for (int64_t x = 0; x < known; ++x)
    sums[x] += std::max(weight * along[x], least) * widened(scores[x * step]);
  for (int64_t x = known; x < count; ++x)
    sums[x] = std::max(weight * along[x], least) * widened(scores[x * step]);
}

// With the usual steps known to the compiler: dense, and channels last with few channels.
template <typename Score>
void add_any_line(const Score *scores, int64_t step, float weight, const float *along, float least, int64_t known,
                  int64_t count, float *sums) {
  switch (step) {
  case 1:
    return add_line(scores, 1, weight, along, least, known, count, sums);
  case 2:
    return add_line(scores, 2, weight, along, least, known, count, sums);
  case 3:
    return add_line(scores, 3, weight, along, least, known, count, sums);
  case 4:
    return add_line(scores, 4, weight, along, least, known, count, sums);
  default:
    return add_line(scores, step, weight, along, least, known, count, sums);
  }
}

// Of windows: how many outputs they have, and their edges. Of a row of them: how long it is, where in its ring of rows it
// begins.
struct Row {
  int64_t outputs, depth, height, across, width, first;

  float *line(float *row, int64_t k, int64_t z, int64_t y) const {
    const int64_t place = first + y < height ? first + y : first + y - height;
    return row + ((k * depth + z) * height + place) * width;
  }
};

// Importance is the product of three vectors, but at least so much.
struct Importance {
  const float *z, *y, *x;
  float least;
};

template <typename Score>
void add(const Score *scores, const int64_t *steps, Row shape, Importance importance, int64_t left, int64_t known,
         int64_t carried, float *row, int threads) {
  in_parts(threads, [&](int part) {
    for (int64_t z = shape.depth * part / threads; z < shape.depth * (part + 1) / threads; ++z)
      for (int64_t k = 0; k < shape.outputs; ++k)
        for (int64_t y = 0; y < shape.height; ++y) {
          if (y + AHEAD_IN_SUMS < shape.height)
            fetch<true>(shape.line(row, k, z, y + AHEAD_IN_SUMS) + left, shape.across);
          add_any_line(scores + k * steps[0] + z * steps[1] + y * steps[2], steps[3], importance.z[z] * importance.y[y],
                       importance.x, importance.least, y < carried ? shape.across : known, shape.across,
                       shape.line(row, k, z, y) + left);
        }
  });
}

// Where windows begin along one axis.
struct Starts {
  const int64_t *first;
  int64_t count;
};

// The sums of the weights of all windows over one line of the volume.
void weigh(Row shape, Importance importance, const Starts *starts, int64_t z, int64_t y, float *__restrict weights) {
  std::fill(weights, weights + shape.width, 0.0f);
  for (int64_t i = 0; i < starts[0].count; ++i) {
    const int64_t in_z = z - starts[0].first[i];
    if (in_z < 0 || in_z >= shape.depth) continue;
    for (int64_t j = 0; j < starts[1].count; ++j) {
      const int64_t in_y = y - starts[1].first[j];
      if (in_y < 0 || in_y >= shape.height) continue;
      const float weight = importance.z[in_z] * importance.y[in_y];
      for (int64_t n = 0; n < starts[2].count; ++n) {
        float *__restrict const here = weights + starts[2].first[n];
        for (int64_t x = 0; x < shape.across; ++x)
          here[x] += std::max(weight * importance.x[x], importance.least);
      }
    }
  }
}

// Means out of sums; returns the largest of the bits of their magnitudes, which tell what is not finite.
int32_t divide(const float *__restrict sums, const float *__restrict weights, int64_t count, float *__restrict means) {
  int32_t largest = 0;
  for (int64_t x = 0; x < count; ++x) {
    means[x] = sums[x] / weights[x];
    largest = std::max(largest, static_cast<int32_t>(bits_of(means[x]) & INT32_MAX));
  }
  return largest;
}

void accumulate(const float *__restrict from, int64_t count, float *__restrict sums) {
  for (int64_t x = 0; x < count; ++x)
    sums[x] += from[x];
}

constexpr int32_t INFINITE = 0x7F800000;

} // namespace

extern "C" {

// pixels [z, y, x] -> out [z, y, x]: minus offset, by scale, within the limits.
//
// kind    of the pixels: 0 uint8, 1 int8, 2 uint16, 3 int16, 4 float32
// narrow  out is bfloat16, else float32
void stackseg_cut(const void *pixels, int32_t kind, void *out, int32_t narrow, const Box *box, float offset, float scale,
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

// Adds the weighted scores of one window to the row that it lies in.
//
// scores   [outputs, depth, height, across], bfloat16 if `narrow`, else float32; `steps` between its elements
// shape    outputs, depth, height, across; width of the row, and where in its ring its first row lies
// weights  importance along z, y and x, one after the other; it is at least `least`
// left     where in the row the window begins, and how many columns from there on have sums
// carried  so many rows have sums in all columns
// row      [outputs, depth, height, width]
void stackseg_add(const void *scores, int32_t narrow, const int64_t *steps, const int64_t *shape, const float *weights,
                  float least, int64_t left, int64_t known, int64_t carried, float *row, int32_t threads) {
  const Row r{shape[0], shape[1], shape[2], shape[3], shape[4], shape[5]};
  const Importance importance{weights, weights + r.depth, weights + r.depth + r.height, least};
  if (narrow)
    add(static_cast<const BFloat16 *>(scores), steps, r, importance, left, known, carried, row, threads);
  else
    add(static_cast<const float *>(scores), steps, r, importance, left, known, carried, row, threads);
}

// Takes leave of the first `rows` of a row of windows: the first `planes` are final, the next layer gets the others.
//
// starts   of the windows along z, y and x, one after the other; `counts` says how many there are
// z, y     where the row begins in the volume
// reached  planes that the layer before reaches
// layer    [outputs, shared, length, width], of which rows from `y` on are used
// scratch  [threads, width]
// means    [outputs, planes, rows, width]
//
// Returns 1 where a score is not finite, else 0.
int32_t stackseg_leave(float *row, const int64_t *shape, const float *weights, float least, const int64_t *starts,
                       const int64_t *counts, int64_t z, int64_t y, int64_t planes, int64_t rows, int64_t reached,
                       float *layer, int64_t shared, int64_t length, float *scratch, float *means, int32_t threads) {
  const Row r{shape[0], shape[1], shape[2], shape[3], shape[4], shape[5]};
  const Importance importance{weights, weights + r.depth, weights + r.depth + r.height, least};
  const Starts along[] = {{starts, counts[0]}, {starts + counts[0], counts[1]}, {starts + counts[0] + counts[1], counts[2]}};
  int32_t largest = 0;
  // Rows are divided, not planes: a plane of the layer is read before another one is written to its place.
#pragma omp parallel for num_threads(threads) reduction(max : largest)
  for (int32_t part = 0; part < threads; ++part) {
    float *const sums_of_weights = scratch + part * r.width;
    for (int64_t i = 0; i < r.depth; ++i)
      for (int64_t j = rows * part / threads; j < rows * (part + 1) / threads; ++j) {
        if (i < planes) weigh(r, importance, along, z + i, y + j, sums_of_weights);
        for (int64_t k = 0; k < r.outputs; ++k) {
          float *const sums = r.line(row, k, i, j);
          float *const below = layer + ((k * shared + i) * length + y + j) * r.width;
          if (i < reached) accumulate(below, r.width, sums);
          if (i < planes)
            largest = std::max(largest, divide(sums, sums_of_weights, r.width,
                                               means + ((k * planes + i) * rows + j) * r.width));
          else
            std::memcpy(below - planes * length * r.width, sums, r.width * sizeof(float));
        }
      }
  }
  return largest >= INFINITE;
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
