// Normalization of pixels into a batch, and blending of scores, in one pass each. They compute the same as
// `service/inference/preprocessing/normalize.py` and `blending.py` with NumPy and torch.
//
// Pixels and scores may have any strides, counted in elements; buffers of sums are dense.

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "../../engine/cpu/simd.hpp"
#include "blend.hpp"
#include "prefetch.hpp"

namespace {

// Calls work(part) for each part in a separate thread. A single part runs without OpenMP, whose overhead is large after a
// network has evicted its data from the caches.
template <typename Work> void in_parts(int parts, Work work) {
  if (parts == 1) return work(0);
#pragma omp parallel for num_threads(parts)
  for (int part = 0; part < parts; ++part)
    work(part);
}

struct Scaling {
  float offset, scale, lowest, highest;
};

template <typename Pixel, typename Out>
void cut_line(const Pixel *from, int64_t from_step, Out *out, int64_t out_step, int64_t count, Scaling s) {
  for (int64_t x = 0; x < count; ++x) {
    float value = (static_cast<float>(from[x * from_step]) - s.offset) / s.scale;
    value = value < s.lowest ? s.lowest : value;
    store_one(out + x * out_step, value > s.highest ? s.highest : value);
  }
}

// A box of pixels: its size along z, y and x, the strides of the pixels in bytes, and the strides of the output in elements.
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
        const bool wraps = y + AHEAD >= height;
        const int64_t later_z = z + wraps, later_y = y + AHEAD - wraps * height;
        if (later_z < depth && later_y < height) fetch<false>(box.line(pixels, later_z, later_y), across * step);
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

} // namespace

extern "C" {

// Normalizes pixels [z, y, x] -> out [z, y, x]: subtracts offset, divides by scale, and clips to [lowest, highest].
//
// kind    type of the pixels: 0 uint8, 1 int8, 2 uint16, 3 int16, 4 float32
// narrow  whether out is bfloat16 instead of float32
void stackseg_scale(const void *pixels, int32_t kind, void *out, int32_t narrow, const Box *box, float offset, float scale,
                  float lowest, float highest, int32_t threads) {
  const Scaling s{offset, scale, lowest, highest};
  constexpr decltype(&cut_into<float>) BY_KIND[] = {cut_into<uint8_t>, cut_into<int8_t>, cut_into<uint16_t>,
                                                    cut_into<int16_t>, cut_into<float>};
  BY_KIND[kind](pixels, out, narrow, *box, s, threads);
}

// Adds the scores of one window, and writes the means that no later window covers.
//
// scores   [outputs, depth, height, across], bfloat16 if `narrow`, otherwise float32, with strides `steps` in elements
// shape    outputs, depth, height, across; number of windows along z, y and x; largest overlap of two windows in planes and
//          in rows; width of the volume
// starts   starts of the windows along z, y and x, concatenated
// at       index of this window along z, y and x
// weights  importance along z, y and x, and its lower limit along x, concatenated, with 16 zeros after each of the last two
// kept     four buffers of sums: two for columns, which are read and written in turn if the overlap along x changes; one
//          for rows; and one for planes
// means    [outputs, planes, rows, width], of which only the completed columns are written
//
// Returns 1 if any mean is not finite, otherwise 0.
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
  // As long as the overlap along x stays the same, sums are updated in place. Otherwise, switch to the other buffer.
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
}
