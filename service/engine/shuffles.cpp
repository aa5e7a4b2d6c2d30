// Voxels of a block to channels and back: runs of voxels beside each other along x are moved as one.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace {

struct Shape {
  int64_t batch, channels, depth, height, width, deep, high, wide, bytes; // blocks; a block's voxels; an element's bytes
};

// Calls f with where a run of a block lies in the image, and where among the channels, of so many bytes.
template <class F> void each_run(const Shape &s, int64_t bytes, int threads, F f) {
  const int64_t line = s.width * bytes, block = s.channels * s.deep * s.high * bytes;
#pragma omp parallel for num_threads(threads)
  for (int64_t row = 0; row < s.batch * s.depth * s.height; ++row) {
    const int64_t y = row % s.height, z = row / s.height % s.depth, window = row / s.height / s.depth;
    for (int64_t c = 0, part = 0; c < s.channels; ++c)
      for (int64_t i = 0; i < s.deep; ++i)
        for (int64_t j = 0; j < s.high; ++j, ++part) {
          const int64_t plane = (window * s.channels + c) * s.depth * s.deep + z * s.deep + i;
          const int64_t image = (plane * s.height * s.high + y * s.high + j) * line;
          const int64_t blocks = row * s.width * block + part * bytes;
          for (int64_t x = 0; x < s.width; ++x) f(image + x * bytes, blocks + x * block);
        }
  }
}

template <class F> void with_bytes(int64_t bytes, F f) {
  if (bytes == 2)
    f(std::integral_constant<int64_t, 2>{});
  else if (bytes == 4)
    f(std::integral_constant<int64_t, 4>{});
  else if (bytes == 8)
    f(std::integral_constant<int64_t, 8>{});
  else
    f(bytes);
}

template <class Move> int shuffle(const int64_t *sizes, int threads, Move move) {
  Shape s;
  std::memcpy(&s, sizes, sizeof(s));
  with_bytes(s.wide * s.bytes, [&](auto bytes) {
    each_run(s, bytes, threads, [&](int64_t image, int64_t blocks) { move(image, blocks, bytes); });
  });
  return 0;
}

} // namespace

extern "C" {

// tensors  image [windows, channels, z, y, x], blocks [windows, blocks along z, y and x, channels, voxels along z, y, x],
//          from the first to the second or the reverse
// sizes    windows, channels, blocks along z, y and x, voxels of a block along them, bytes of an element
// Both always return 0.
int stackseg_space_to_depth(void *const *tensors, const int64_t *sizes, const double *, int threads) {
  const auto *image = static_cast<const char *>(tensors[0]);
  auto *blocks = static_cast<char *>(tensors[1]);
  return shuffle(sizes, threads,
                 [=](int64_t from, int64_t to, auto bytes) { std::memcpy(blocks + to, image + from, bytes); });
}

int stackseg_depth_to_space(void *const *tensors, const int64_t *sizes, const double *, int threads) {
  const auto *blocks = static_cast<const char *>(tensors[0]);
  auto *image = static_cast<char *>(tensors[1]);
  return shuffle(sizes, threads,
                 [=](int64_t to, int64_t from, auto bytes) { std::memcpy(image + to, blocks + from, bytes); });
}
}
