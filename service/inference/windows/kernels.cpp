// Normalization of pixels into a batch, and blending of scores, in one pass each. The results are the same as those that
// `service/inference/preprocessing/normalize.py` and `blending.py` compute with NumPy and torch.
//
// Pixels and scores may have any strides. Buffers of sums are contiguous.

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "../../engine/cpu/simd.hpp"
#include "blend.hpp"
#include "prefetch.hpp"

namespace {

// Calls work(part) for each part in a separate thread. A single part runs without OpenMP, whose overhead is high after a
// network has evicted the caches.
template <typename Work> void run_in_parts(int parts, Work work) {
  if (parts == 1) return work(0);
#pragma omp parallel for num_threads(parts)
  for (int part = 0; part < parts; ++part)
    work(part);
}

struct Scaling {
  float offset, scale, lowest, highest;
};

template <typename Pixel, typename Out>
void scale_line(const Pixel *pixels, int64_t pixel_step, Out *out, int64_t out_step, int64_t count, Scaling scaling) {
  for (int64_t x = 0; x < count; ++x) {
    float value = (static_cast<float>(pixels[x * pixel_step]) - scaling.offset) / scaling.scale;
    value = value < scaling.lowest ? scaling.lowest : value;
    store_one(out + x * out_step, value > scaling.highest ? scaling.highest : value);
  }
}

// Region to normalize: its size along z, y and x, and the strides of the pixels (bytes) and of the output (elements).
struct Box {
  int64_t size[3], pixel_strides[3], out_strides[3];

  template <typename Pixel> const Pixel *line(const Pixel *pixels, int64_t z, int64_t y) const {
    return pixels + (z * pixel_strides[0] + y * pixel_strides[1]) / int64_t(sizeof(Pixel));
  }
};

template <typename Pixel, typename Out>
void scale_box(const Pixel *pixels, Out *out, const Box &box, Scaling scaling, int threads) {
  const int64_t depth = box.size[0], height = box.size[1], width = box.size[2];
  const int64_t step = box.pixel_strides[2] / int64_t(sizeof(Pixel));
  run_in_parts(threads, [&](int part) {
    for (int64_t z = depth * part / threads; z < depth * (part + 1) / threads; ++z)
      for (int64_t y = 0; y < height; ++y) {
        const bool is_in_next_plane = y + PREFETCH_DISTANCE >= height;
        const int64_t later_z = z + is_in_next_plane, later_y = y + PREFETCH_DISTANCE - is_in_next_plane * height;
        if (later_z < depth && later_y < height) prefetch<false>(box.line(pixels, later_z, later_y), width * step);
        Out *const out_line = out + z * box.out_strides[0] + y * box.out_strides[1];
        if (step == 1 && box.out_strides[2] == 1)
          scale_line(box.line(pixels, z, y), 1, out_line, 1, width, scaling);
        else
          scale_line(box.line(pixels, z, y), step, out_line, box.out_strides[2], width, scaling);
      }
  });
}

template <typename Pixel>
void scale_pixels(const void *pixels, void *out, int32_t is_bfloat16, const Box &box, Scaling scaling, int threads) {
  const Pixel *const typed_pixels = static_cast<const Pixel *>(pixels);
  if (is_bfloat16)
    scale_box(typed_pixels, static_cast<Bfloat16 *>(out), box, scaling, threads);
  else
    scale_box(typed_pixels, static_cast<float *>(out), box, scaling, threads);
}

} // namespace

extern "C" {

// Normalizes pixels [z, y, x] to out [z, y, x]: subtracts the offset, divides by the scale, and clips to the limits.
//
// pixel_type   type of the pixels: 0 uint8, 1 int8, 2 uint16, 3 int16, 4 float32
// is_bfloat16  whether out is bfloat16 instead of float32
void stackseg_scale(const void *pixels, int32_t pixel_type, void *out, int32_t is_bfloat16, const Box *box, float offset,
                    float scale, float lowest, float highest, int32_t threads) {
  const Scaling scaling{offset, scale, lowest, highest};
  constexpr decltype(&scale_pixels<float>) SCALE_FUNCTIONS[] = {
      scale_pixels<uint8_t>, scale_pixels<int8_t>, scale_pixels<uint16_t>, scale_pixels<int16_t>, scale_pixels<float>};
  SCALE_FUNCTIONS[pixel_type](pixels, out, is_bfloat16, *box, scaling, threads);
}

// Adds the scores of one window, and writes the means that no later window covers.
//
// scores   [outputs, depth, height, width], bfloat16 if `is_bfloat16`, else float32; `steps` are the strides in elements
// shape    outputs, depth, height, width; numbers of windows along z, y and x; maximum numbers of planes and rows that two
//          windows share; width of the volume
// starts   starts of the windows along z, y and x, concatenated
// index    indices of this window along z, y and x
// weights  weights along z, y and x, and the minimum weight along x, concatenated; each of the last two is followed by 16
//          zeros
// buffers  two buffers for columns, one for rows and one for planes; if the number of shared columns changes from one pair of
//          windows to the next, one column buffer is read while the other is written
// means    [outputs, planes, rows, width], of which the completed columns are written
//
// Returns 1 if a mean is not finite, else 0.
int32_t stackseg_blend(const void *scores, int32_t is_bfloat16, const int64_t *steps, const int64_t *shape,
                       const int64_t *starts, const int64_t *index, const float *weights, float *const *buffers, float *means,
                       int32_t threads) {
  const int64_t *const lengths = shape + 1, *const counts = shape + 4;
  const Windows windows{shape[0],
                        {starts, counts[0], lengths[0]},
                        {starts + counts[0], counts[1], lengths[1]},
                        {starts + counts[0] + counts[1], counts[2], lengths[2]},
                        shape[7], shape[8], shape[9]};
  const float *const along_x = weights + lengths[0] + lengths[1];
  const Importance importance{weights, weights + lengths[0], along_x, along_x + lengths[2] + WEIGHT_PADDING};
  // While the number of shared columns stays the same, each line of sums overwrites the line that was just read.
  int64_t read_buffer = 0;
  for (int64_t n = 1; n <= index[2]; ++n)
    read_buffer ^= windows.x.num_shared(n) != windows.x.num_shared(n - 1);
  const int64_t written_buffer =
      read_buffer ^ (windows.x.num_shared(index[2]) != windows.x.length - windows.x.num_final(index[2]));
  const int64_t final_rows = windows.y.num_final(index[1]);
  std::atomic<bool> failed{false};
  run_in_parts(threads, [&](int part) {
    const auto work = [&](const auto *typed_scores) {
      return blend(typed_scores, steps, windows, index, importance, buffers[read_buffer], buffers[written_buffer], buffers[2],
                   buffers[3], means, final_rows * part / threads, final_rows * (part + 1) / threads);
    };
    if (!(is_bfloat16 ? work(static_cast<const Bfloat16 *>(scores)) : work(static_cast<const float *>(scores)))) failed = true;
  });
  return failed;
}
}
