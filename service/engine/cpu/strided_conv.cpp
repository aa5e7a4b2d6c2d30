// Convolutions with equal kernel size and stride and without padding, including transposed ones, for channels-last
// images. Images are float32 or bfloat16; sums are float32.
//
// Patches of the finer image do not overlap, so the convolution is one matrix product with one row for each position of
// the coarser image. A patch consists of several runs of voxels along x. The runs of neighboring positions are
// contiguous in memory, so rows are read and written in place, without an im2col copy.
//
// With AVX2, these kernels are about as fast as oneDNN. With AVX-512 and BF16, oneDNN's transposed convolutions spend
// a lot of time outside the matrix product. These kernels are 1.2 to 1.8 times as fast for transposed convolutions and
// 1.0 to 1.1 times as fast for strided convolutions, but 1x1x1 convolutions take 1.3 to 1.5 times as long. This is
// accepted because a network with a oneDNN layer cannot be captured in one call. Tiles that span several lines are not
// worthwhile: they save 4 to 8 us on short lines, but cost more on large layers.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "gemm.hpp"
#include "simd.hpp"

namespace {

constexpr int64_t MAX_PIECE_POSITIONS = 24; // maximum number of positions along x in one piece of work

// An image, and the size of the patch of voxels that belongs to one position.
struct Image {
  int64_t depth, height, width, channels;
  int64_t patch_depth, patch_height, patch_width;
  // Number of elements in a run, which is also the distance between positions along x.
  int64_t run_length() const { return patch_width * channels; }
  // Number of runs in a patch.
  int64_t patch_runs() const { return patch_depth * patch_height; }
  // Offset of the first position in a line of positions.
  int64_t line_offset(int64_t window, int64_t z, int64_t y) const {
    return ((window * depth + z * patch_depth) * height + y * patch_height) * width * channels;
  }
  // Distance between lines of positions in a plane.
  int64_t line_stride() const { return patch_height * width * channels; }
  // Offset of a run from the first run of its patch.
  int64_t run_offset(int64_t run) const {
    return (run / patch_height * height + run % patch_height) * width * channels;
  }
};

struct Layer {
  int64_t batch, depth, height, width; // number of windows, and of positions along each axis
  Image in, out;
  int64_t has_paired_weights; // whether weights of two inputs are interleaved, for the processor's BF16 dot product
};

template <class T> struct Work {
  Layer layer;
  const T *x;
  const float *weights, *bias;
  const T *skip; // added to the rounded result, or null
  T *y;
  float slope;
};

// Processes one input at a time.
struct Single {
  static constexpr int STEP = 1;
  template <class T> static void add(Floats<LANES> &sum, const T *a, Floats<LANES> w) { sum += load_one(a) * w; }
};

#if defined(__AVX512BF16__) && defined(__AVX512VL__)
constexpr bool HAS_PAIR_PRODUCT = true;
// Processes two inputs at a time.
struct Paired {
  static constexpr int STEP = 2;
  static void add(Floats<16> &sum, const Bfloat16 *a, Floats<16> w) {
    int32_t pair;
    std::memcpy(&pair, a, sizeof(pair));
    sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)w);
  }
};
#else
constexpr bool HAS_PAIR_PRODUCT = false;
typedef Single Paired;
#endif

// Multiplies R positions, starting at `a`, by V vectors of columns. Bias and activation are in a separate function. In
// a single function, the compiler would hold a third of the sums in memory instead of registers, and layers of 256
// channels would take 1.5 times as long.
template <class Product, int R, int V, class T>
[[gnu::noinline]] void multiply_tile(const Image &in, const T *a, const float *weights, float *sums) {
  const int64_t row = in.run_length(), line = in.width * in.channels, plane = in.height * line;
  Floats<LANES> sum[R][V];
#pragma GCC unroll 24
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sum[r][v] = Floats<LANES>{};
  for (int64_t i = 0; i < in.patch_depth; ++i)
    for (int64_t j = 0; j < in.patch_height; ++j) {
      const T *at = a + i * plane + j * line;
      for (const T *end = at + row; at < end; at += Product::STEP, weights += V * LANES) {
        Floats<LANES> w[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) w[v] = load<LANES>(weights + v * LANES);
#pragma GCC unroll 24
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) Product::add(sum[r][v], at + r * row, w[v]);
      }
    }
#pragma GCC unroll 24
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store<LANES>(sums + (r * V + v) * LANES, sum[r][v]);
}

// Destination of the results of a tile, and the skip connection that is added to them, or null.
template <class T> struct Target {
  T *y;
  const T *skip;
  int64_t row_stride, columns; // distance between rows; maximum number of columns in a row
};

// Load or store the first `count` elements of a vector.
template <class T> Floats<LANES> load_partial(const T *from, int64_t count) {
  T values[LANES] = {};
  std::memcpy(values, from, count * sizeof(T));
  return load<LANES>(values);
}
template <class T> void store_partial(T *to, Floats<LANES> value, int64_t count) {
  T values[LANES];
  store<LANES>(values, value);
  std::memcpy(to, values, count * sizeof(T));
}

// Returns `value` rounded to T and converted back.
template <class T> Floats<LANES> round_to(Floats<LANES> value) {
  T values[LANES];
  store<LANES>(values, value);
  return load<LANES>(values);
}

// Adds the bias to the sums of a tile, applies the activation, adds the skip connection, and stores the results.
template <int V, class T, class Activation>
[[gnu::noinline]] void finish_tile(const float *sums, int64_t rows, const float *bias, const Activation &activation,
                                   const Target<T> &to) {
  for (int v = 0; v < V; ++v) {
    const Floats<LANES> offset = load<LANES>(bias + v * LANES);
    const int64_t count = to.columns - v * LANES;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = r * to.row_stride + v * LANES;
      Floats<LANES> value = activation(load<LANES>(sums + (r * V + v) * LANES) + offset);
      if (to.skip) {
        value = round_to<T>(value);
        value += count < LANES ? load_partial(to.skip + at, count) : load<LANES>(to.skip + at);
      }
      if (count < LANES)
        store_partial(to.y + at, value, count);
      else
        store<LANES>(to.y + at, value);
    }
  }
}

template <int V, class T>
void finish(const float *sums, int64_t rows, const float *bias, float slope, const Target<T> &to) {
  if (slope == 1)
    finish_tile<V>(sums, rows, bias, Identity{}, to);
  else if (slope == 0)
    finish_tile<V>(sums, rows, bias, Relu{}, to);
  else
    finish_tile<V>(sums, rows, bias, LeakyRelu{slope}, to);
}

// Prefetches `count` elements, because the hardware does not predict the accesses to patches. Without
// prefetching, the top layer of a network, whose skip connection comes from the third-level cache, takes twice as long.
// Elements to read are prefetched into the second-level cache, because the weights need most of the first.
template <bool WRITE, class T> inline void prefetch(const T *from, int64_t count) {
  for (int64_t at = 0; at < count; at += 64 / sizeof(T)) __builtin_prefetch(from + at, WRITE, WRITE ? 3 : 2);
}

// Computes `count` positions along x, starting at `a`, and prefetches the data of the following positions.
template <class Product, class T>
void multiply_positions(const Work<T> &work, const T *a, int64_t count, T *y, const T *skip) {
  const Image &in = work.layer.in, &out = work.layer.out;
  const bool is_single_line = work.layer.height == 1;
  const int64_t in_ahead = is_single_line ? MAX_PIECE_POSITIONS * in.run_length() : in.line_stride();
  const int64_t out_ahead = is_single_line ? MAX_PIECE_POSITIONS * out.run_length() : out.line_stride();
  const int64_t inputs = in.patch_runs() * in.run_length() / Product::STEP;
  const int64_t padded_columns = count_vectors(out.run_length()) * LANES;
  const float *weights = work.weights;
  for (int64_t run = 0; run < out.patch_runs(); ++run)
    for (int64_t column = 0; column < padded_columns;) {
      const int64_t at = out.run_offset(run) + column, left = out.run_length() - column;
      const int vectors = next_block_vectors((padded_columns - column) / LANES);
      with_constant<3>(vectors, [&](auto block_vectors) {
        constexpr int V = decltype(block_vectors)::value;
        for_each_tile<V>(count, [&](auto tile_height, int64_t first) {
          constexpr int R = decltype(tile_height)::value;
          alignas(64) float sums[R * V * LANES];
          multiply_tile<Product, R, V>(in, a + first * in.run_length(), weights, sums);
          const int64_t to = at + first * out.run_length();
          if (run == 0 && column == 0)
            for (int64_t each = 0; each < in.patch_runs(); ++each)
              prefetch<false>(a + in_ahead + in.run_offset(each) + first * in.run_length(), R * in.run_length());
          if (column == 0) {
            prefetch<true>(y + out_ahead + to, R * out.run_length());
            if (skip) prefetch<false>(skip + out_ahead + to, R * out.run_length());
          }
          const Target<T> target{y + to, skip ? skip + to : nullptr, out.run_length(), left};
          finish<V>(sums, R, work.bias + column, work.slope, target);
        });
      });
      column += vectors * LANES, weights += inputs * vectors * LANES;
    }
}

template <class Product, class T> void multiply(const Work<T> &work, int threads) {
  const Layer &s = work.layer;
  const int64_t line_pieces = (s.width + MAX_PIECE_POSITIONS - 1) / MAX_PIECE_POSITIONS;
  const int64_t total_pieces = s.batch * s.depth * s.height * line_pieces;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t piece = 0; piece < total_pieces; ++piece) {
    const int64_t line = piece / line_pieces, x = piece % line_pieces * MAX_PIECE_POSITIONS;
    const int64_t y = line % s.height, z = line / s.height % s.depth, window = line / s.height / s.depth;
    const int64_t from = s.in.line_offset(window, z, y) + x * s.in.run_length();
    const int64_t to = s.out.line_offset(window, z, y) + x * s.out.run_length();
    multiply_positions<Product>(work, work.x + from, std::min(MAX_PIECE_POSITIONS, s.width - x), work.y + to,
                                work.skip ? work.skip + to : nullptr);
  }
}

template <class T> void convolve(const Layer &layer, void *const *tensors, float slope, int threads) {
  const Work<T> work{layer,
                     static_cast<const T *>(tensors[0]),
                     static_cast<const float *>(tensors[1]),
                     static_cast<const float *>(tensors[2]),
                     static_cast<const T *>(tensors[3]),
                     static_cast<T *>(tensors[4]),
                     slope};
  if constexpr (std::is_same_v<T, Bfloat16>) {
    if (layer.has_paired_weights) return multiply<Paired>(work, threads);
  }
  multiply<Single>(work, threads);
}

} // namespace

extern "C" {

// Return the width of a vector, and the width of the next block of columns of weights, which is a multiple of the
// vector width.
int64_t stackseg_patch_lanes() { return LANES; }
int64_t stackseg_patch_columns(int64_t left) { return next_block_vectors(left / LANES) * LANES; }

// Returns whether bfloat16 weights should be packed in pairs.
int64_t stackseg_patch_pairs() { return HAS_PAIR_PRODUCT; }

// tensors  x; weights, float32 [run of the result][column block][inputs, columns] or, if packed in pairs, bfloat16
//          [..][inputs / 2, columns, 2]; bias [columns]; skip connection or null -> y
// sizes    windows, positions along z, y and x; for x and then for y: voxels along z, y and x, channels, and voxels per
//          position along z, y and x; whether weights are packed in pairs; whether images are bfloat16
// reals    slope of the activation for negative values
// Always returns 0.
int stackseg_patches(void *const *tensors, const int64_t *sizes, const double *reals, int threads) {
  Layer layer;
  std::memcpy(&layer, sizes, sizeof(layer));
  const float slope = static_cast<float>(reals[0]);
  if (sizes[sizeof(layer) / sizeof(int64_t)])
    convolve<Bfloat16>(layer, tensors, slope, threads);
  else
    convolve<float>(layer, tensors, slope, threads);
  return 0;
}
}
