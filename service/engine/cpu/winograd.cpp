// 3x3x3 convolution, stride 1, padding 1, channels last: Winograd's F(4x4x4, 3x3x3) (Lavin and Gray, "Fast Algorithms
// for Convolutional Neural Networks", 2016). Images are float32 or bfloat16; computation is in float32.
//
// A 4x4x4 tile of outputs takes 216 products for each pair of channels, an eighth of the usual 1728. Direct
// convolutions already run at the speed of a matrix product, so only an algorithm with fewer multiplications can be
// faster. Even in float32, Winograd's algorithm is faster than a direct convolution on BF16 units. F(4x4, 3x3) within
// planes takes twice as many products, but F(4x4x4, 3x3x3) is only 1.3 times as fast, because its transforms move more
// data. With few channels, the transforms take nearly half of the time.
//
// Tiles of 8x4x4 and 8x8x4 outputs save 17% and 31% of these products, but have larger rounding errors and more
// weights. Tiles of 8x8x8 would save 42%, but layers of 32 channels would be only 1.03 times as fast as with 8x8x4.
//
// Tiles are processed in blocks that fit in a core's second-level cache: about sixteen tiles and, if possible, whole
// rows, because adjacent tiles along y share two of their six lines. With fewer tiles, reading the weights takes longer
// than multiplying. A block is processed one point along z after the other: it is sampled along y and x, multiplied (36
// or 60 small matrix products), and interpolated along x and y. Intermediate values thus take a sixth or a tenth of the
// memory.
//
// Sampled weights take sixteen times as many bytes as 27 BF16 weights. Layers with 256 or more channels and fewer than
// about ten tiles are therefore slower than with oneDNN. They are replaced anyway, because the number of tiles is not
// yet known when layers are replaced, and large images gain more than small ones lose.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "gemm.hpp"
#include "simd.hpp"
#include "winograd_transforms.hpp"

namespace {

// Distance in elements of the image. The first-level caches of most processors without AVX-512 have eight ways, into
// which six or ten lines of an image whose planes are a multiple of 4 KiB apart cannot be prefetched far ahead.
constexpr int PREFETCH_DISTANCE = LANES == 16 ? 512 : 128;

struct Shape {
  int64_t batch, depth, height, width, inputs, outputs;
};

// Numbers of outputs and of sampling points of a tile.
template <int Z, int Y, int X> struct Tile {
  static constexpr int DEPTH = Z, HEIGHT = Y, WIDTH = X, PLANE_OUTPUTS = Y * X;
  static constexpr int Z_POINTS = Z + 2, Y_POINTS = Y + 2, X_POINTS = X + 2;
  // Number of points at one point along z, and in total.
  static constexpr int PLANE_POINTS = Y_POINTS * X_POINTS, POINTS = Z_POINTS * PLANE_POINTS;

  // Numbers of tiles along each axis, and in total.
  static int64_t deep(const Shape &s) { return (s.depth + Z - 1) / Z; }
  static int64_t high(const Shape &s) { return (s.height + Y - 1) / Y; }
  static int64_t wide(const Shape &s) { return (s.width + X - 1) / X; }
  static int64_t count(const Shape &s) { return s.batch * deep(s) * high(s) * wide(s); }
};

// Position of the first output in a tile. Tiles are numbered along x first, then y, z and the batch.
struct Place {
  int64_t window, z, y, x;
  template <class Tile> static Place of(const Shape &s, int64_t tile) {
    const int64_t row = tile / Tile::wide(s), plane = row / Tile::high(s);
    return {plane / Tile::deep(s), plane % Tile::deep(s) * Tile::DEPTH, row % Tile::high(s) * Tile::HEIGHT,
            tile % Tile::wide(s) * Tile::WIDTH};
  }
};

// Scratch memory of one thread, retained between calls.
class Scratch {
public:
  float *take(size_t count) {
    if (count > size_) {
      memory_.reset(static_cast<float *>(std::aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64)));
      size_ = memory_ ? count : 0;
    }
    return memory_.get();
  }

private:
  struct Free {
    void operator()(float *p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> memory_;
  size_t size_ = 0;
};

// Returns a stride for rows of `count` floats: an odd number of cache lines. Rows of the matrix products and values at
// the points along z are read and written in parallel. If their distance were a multiple of 4 KiB, they would share one
// set of the first-level cache, which holds only eight lines.
inline int64_t pad_stride(int64_t count) {
  return ((count + CACHE_LINE_FLOATS - 1) / CACHE_LINE_FLOATS | 1) * CACHE_LINE_FLOATS;
}

// The functions for the five stages below are not inlined, so that profilers can distinguish them.

// A block of tiles and its intermediate arrays, all float32.
struct Block {
  int64_t first, count;
  int64_t points, plane_points; // number of sampling points of a tile, in total and at one point along z
  float *lines;    // for each run of tiles along x: [y][z point][x, inputs]
  float *sampled;  // [count, sampled_stride ...][y point, x point, inputs], at one point along z
  float *products; // [count, product_stride ...][y point, x point, outputs], at one point along z
  float *reduced;  // [count, reduced_stride ...][z point, reduced_step ...][y, x, outputs]
  int64_t sampled_stride, product_stride, reduced_stride, reduced_step;
};

// Adjacent tiles of a block along x, and the lines that they depend on: [y][z point][x, inputs].
template <class Tile> struct Run {
  Place at;
  int64_t count, stride;
  bool shares_lines; // whether the previous run is the adjacent one along y, with which this run shares two lines
  int64_t start; // offset of the run's lines within the lines of the block, in floats
  Run(const Shape &s, const Block &block) : Run(s, block, 0, 0) {}
  Run next(const Shape &s, const Block &block, int64_t done) const {
    Run run(s, block, done, end());
    run.shares_lines = run.count == count && run.at.x == 0 && at.x == 0 && run.at.y > 0 && run.at.z == at.z;
    if (run.shares_lines) run.start -= (Tile::Y_POINTS - Tile::HEIGHT) * Tile::Z_POINTS * stride;
    return run;
  }
  int64_t end() const { return start + Tile::Y_POINTS * Tile::Z_POINTS * stride; }

private:
  Run(const Shape &s, const Block &block, int64_t done, int64_t from) : at(Place::of<Tile>(s, block.first + done)) {
    count = std::min(block.count - done, Tile::wide(s) - at.x / Tile::WIDTH);
    stride = pad_stride((count * Tile::WIDTH + 2) * s.inputs), shares_lines = false, start = from;
  }
};

// Calls f with each run and the number of tiles before it. Returns the number of floats in all lines.
template <class Tile, class F> int64_t for_each_run(const Shape &s, const Block &block, F f) {
  Run<Tile> run(s, block);
  for (int64_t done = 0;;) {
    f(run, done);
    done += run.count;
    if (done == block.count) return run.end();
    run = run.next(s, block, done);
  }
}

// Samples voxels along z, with zeros outside the image: out[y][z point][x, inputs]. Lines are read in parallel from
// start to end, which the hardware prefetches. The hardware would not prefetch 36 lines that are read column by column.
// Also, lines of 32 voxels with 32 channels, which are a multiple of 4 KiB apart, would evict each other from the
// caches.
template <class Tile, int G, class T>
[[gnu::noinline]] void sample_lines(const T *image, const T *zeros, const Shape &s, const Run<Tile> &run, float *out) {
  constexpr int POINTS = Tile::Z_POINTS;
  const Place &at = run.at;
  const int64_t left = std::max<int64_t>(at.x - 1, 0), right = std::min(at.x + run.count * Tile::WIDTH + 1, s.width);
  const int64_t before = (left - (at.x - 1)) * s.inputs, length = (right - left) * s.inputs;
  const int64_t after = (run.count * Tile::WIDTH + 2) * s.inputs - before - length, stride = run.stride;
  for (int64_t j = run.shares_lines ? Tile::Y_POINTS - Tile::HEIGHT : 0; j < Tile::Y_POINTS; ++j) {
    const int64_t y = at.y - 1 + j;
    const T *lines[POINTS];
    for (int64_t i = 0; i < POINTS; ++i) {
      const int64_t z = at.z - 1 + i;
      const bool is_inside = z >= 0 && z < s.depth && y >= 0 && y < s.height;
      lines[i] = is_inside ? image + (((at.window * s.depth + z) * s.height + y) * s.width + left) * s.inputs : zeros;
    }
    float *line = out + j * POINTS * stride;
    for (int i = 0; i < POINTS; ++i) {
      std::memset(line + i * stride, 0, before * sizeof(float));
      std::memset(line + i * stride + before + length, 0, after * sizeof(float));
    }
    line += before;
    for (int64_t c = 0; c < length; c += G) {
      Floats<G> d[POINTS], t[POINTS];
      for (int i = 0; i < POINTS; ++i) __builtin_prefetch(lines[i] + c + PREFETCH_DISTANCE);
      for (int i = 0; i < POINTS; ++i) d[i] = load<G>(lines[i] + c);
      sample(d, t);
      for (int i = 0; i < POINTS; ++i) store<G>(line + i * stride + c, t[i]);
    }
  }
}

// Calls f(0) to f(COUNT - 1). Unrolled loops can hold arrays in registers. Arrays that do not fit are accessed faster
// by loops that are not unrolled.
template <int COUNT, bool UNROLLED, class F> [[gnu::always_inline]] inline void repeat(F f) {
  if constexpr (UNROLLED) {
#pragma GCC unroll 10
    for (int i = 0; i < COUNT; ++i) f(i);
  } else {
#pragma GCC unroll 1
    for (int i = 0; i < COUNT; ++i) f(i);
  }
}

// Samples one group of channels of the lines of one tile at one point along z -> sampled[y point, x point][inputs ...].
template <class Tile, int G>
[[gnu::noinline]] void sample_plane(const float *lines, int64_t line_stride, int64_t inputs, float *sampled) {
  // Half of the points along x are processed at a time if their values then fit in registers.
  constexpr bool FITS = Tile::PLANE_POINTS <= 36;
  constexpr int PARTS = FITS ? 2 : 1, WIDTH = Tile::X_POINTS / PARTS;
#pragma GCC unroll 2
  for (int part = 0; part < PARTS; ++part) {
    Floats<G> along_x[WIDTH][Tile::Y_POINTS];
    repeat<Tile::Y_POINTS, FITS>([&](int j) {
      Floats<G> d[Tile::X_POINTS], t[Tile::X_POINTS];
      for (int k = 0; k < Tile::X_POINTS; ++k) d[k] = load<G>(lines + j * line_stride + k * inputs);
      sample(d, t);
      for (int k = 0; k < WIDTH; ++k) along_x[k][j] = t[part * WIDTH + k];
    });
    repeat<WIDTH, FITS>([&](int k) {
      Floats<G> t[Tile::Y_POINTS];
      sample(along_x[k], t);
      for (int j = 0; j < Tile::Y_POINTS; ++j)
        store<G>(sampled + (j * Tile::X_POINTS + part * WIDTH + k) * inputs, t[j]);
    });
  }
}

template <class Tile, int G> void sample_block(const Shape &s, const Block &b, int64_t z_point) {
  for_each_run<Tile>(s, b, [&](const Run<Tile> &run, int64_t done) {
    const float *lines = b.lines + run.start + z_point * run.stride;
    for (int64_t tile = 0; tile < run.count; ++tile)
      for (int64_t c = 0; c < s.inputs; c += G)
        sample_plane<Tile, G>(lines + tile * Tile::WIDTH * s.inputs + c, Tile::Z_POINTS * run.stride, s.inputs,
                              b.sampled + (done + tile) * b.sampled_stride + c);
  });
}

// Multiplies R rows by V vectors of columns: out[row, column] = sum over channels of
// a[row, channel] * weights[channel, column].
//
// The loops are unrolled explicitly. Otherwise, the compiler would hold the sums in memory instead of registers, and
// layers of 8 inputs would take 1.2 to 1.5 times as long. Weights are prefetched one point ahead because they are
// evicted from the caches between two blocks. Without prefetching, layers of 96 channels take 1.7 times as long.
template <int R, int V>
[[gnu::noinline]] void multiply_tile(const float *a, int64_t stride, int64_t inputs, const float *weights, float *out,
                          int64_t out_stride) {
  Floats<LANES> sum[R][V];
#pragma GCC unroll 24
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sum[r][v] = Floats<LANES>{};
  for (int64_t c = 0; c < inputs; ++c) {
    Floats<LANES> w[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) w[v] = load<LANES>(weights + v * LANES);
    for (int column = 0; column < V * LANES; column += CACHE_LINE_FLOATS)
      __builtin_prefetch(weights + inputs * V * LANES + column);
#pragma GCC unroll 24
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sum[r][v] += a[r * stride + c] * w[v];
    weights += V * LANES;
  }
#pragma GCC unroll 24
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store<LANES>(out + r * out_stride + v * LANES, sum[r][v]);
}

// Multiplies the matrices of one sampling point: a[rows, inputs] x weights[inputs, V vectors] -> out[rows, V vectors].
template <int V>
void multiply(int64_t rows, const float *a, int64_t stride, int64_t inputs, const float *weights, float *out,
              int64_t out_stride) {
  for_each_tile<V>(rows, [&](auto tile_height, int64_t first) {
    multiply_tile<decltype(tile_height)::value, V>(a + first * stride, stride, inputs, weights,
                                                   out + first * out_stride, out_stride);
  });
}

// Multiplies the matrices at one point along z. `weights` contains the weights of all columns, in the layout of
// `stackseg_convolve`.
void multiply_block(const Shape &s, const Block &b, const float *weights, int64_t z_point) {
  for (int64_t column = 0; column < s.outputs;) {
    const int vectors = next_block_vectors((s.outputs - column) / LANES);
    const int64_t size = s.inputs * vectors * LANES;
    for (int64_t p = 0; p < b.plane_points; ++p) {
      const float *in = b.sampled + p * s.inputs;
      const float *point_weights = weights + (z_point * b.plane_points + p) * size;
      float *out = b.products + p * s.outputs + column;
      with_constant<3>(vectors, [&](auto block_vectors) {
        multiply<decltype(block_vectors)::value>(b.count, in, b.sampled_stride, s.inputs, point_weights, out,
                                                 b.product_stride);
      });
    }
    column += vectors * LANES, weights += b.points * size;
  }
}

// Interpolates one group of channels of one tile at one point along z: products[y point, x point][outputs ...] ->
// reduced[y, x][outputs ...].
template <class Tile, int G>
[[gnu::noinline]] void interpolate_plane(const float *products, int64_t outputs, float *reduced) {
  constexpr bool FITS = Tile::PLANE_POINTS <= 36;
  Floats<G> along_x[Tile::WIDTH][Tile::Y_POINTS];
  repeat<Tile::Y_POINTS, FITS>([&](int j) {
    Floats<G> m[Tile::X_POINTS], line[Tile::WIDTH];
    for (int k = 0; k < Tile::X_POINTS; ++k) m[k] = load<G>(products + (j * Tile::X_POINTS + k) * outputs);
    interpolate(m, line);
    for (int x = 0; x < Tile::WIDTH; ++x) along_x[x][j] = line[x];
  });
  repeat<Tile::WIDTH, FITS>([&](int x) {
    Floats<G> line[Tile::HEIGHT];
    interpolate(along_x[x], line);
    for (int y = 0; y < Tile::HEIGHT; ++y) store<G>(reduced + (y * Tile::WIDTH + x) * outputs, line[y]);
  });
}

template <class Tile, int G> void interpolate_block(const Shape &s, const Block &b, int64_t z_point) {
  for (int64_t tile = 0; tile < b.count; ++tile)
    for (int64_t c = 0; c < s.outputs; c += G)
      interpolate_plane<Tile, G>(b.products + tile * b.product_stride + c, s.outputs,
                                 b.reduced + tile * b.reduced_stride + z_point * b.reduced_step + c);
}

// Interpolates one tile along z, reduced[z point, reduced_step ...][y, x, outputs] -> outputs, and applies bias and
// activation.
template <class Tile, int G, class T, class Activation>
[[gnu::noinline]] void finish_tile(const float *reduced, int64_t reduced_step, const float *bias,
                                   const Activation &activation, const Shape &s, const Place &at, T *result) {
  const int64_t deep = std::min<int64_t>(Tile::DEPTH, s.depth - at.z);
  const int64_t high = std::min<int64_t>(Tile::HEIGHT, s.height - at.y);
  const int64_t wide = std::min<int64_t>(Tile::WIDTH, s.width - at.x);
  const int64_t step = s.outputs, line_step = s.width * step, plane_step = s.height * line_step;
  result += (at.window * s.depth + at.z) * plane_step + at.y * line_step + at.x * step;
  for (int64_t y = 0; y < high; ++y)
    for (int64_t x = 0; x < wide; ++x)
      for (int64_t c = 0; c < step; c += G) {
        Floats<G> m[Tile::Z_POINTS], line[Tile::DEPTH];
        for (int i = 0; i < Tile::Z_POINTS; ++i)
          m[i] = load<G>(reduced + i * reduced_step + (y * Tile::WIDTH + x) * step + c);
        interpolate(m, line);
        const Floats<G> offset = bias ? load<G>(bias + c) : Floats<G>{};
        T *out = result + y * line_step + x * step + c;
        // Prefetch the memory for the outputs of the next tile, because a write outside the caches would stall.
        for (int z = 0; z < Tile::DEPTH; ++z) __builtin_prefetch(out + z * plane_step + Tile::WIDTH * step, 1);
        for (int64_t z = 0; z < deep; ++z, out += plane_step) store<G>(out, activation(line[z] + offset));
      }
}

template <class T> struct Work {
  Shape shape;
  const T *image;
  const float *weights, *bias;
  T *result;
  float slope;
};

template <class Tile, int G, class T, class Activation>
void finish_block(const Work<T> &work, const Block &b, const Activation &activation) {
  for (int64_t tile = 0; tile < b.count; ++tile)
    finish_tile<Tile, G>(b.reduced + tile * b.reduced_stride, b.reduced_step, work.bias, activation, work.shape,
                         Place::of<Tile>(work.shape, b.first + tile), work.result);
}

// Convolves one block. IN input channels and OUT output channels are transformed at a time, as vectors.
template <class Tile, int IN, int OUT, class T>
void convolve_block(const Work<T> &work, const T *zeros, const Block &b) {
  const Shape &s = work.shape;
  for_each_run<Tile>(s, b, [&](const Run<Tile> &run, int64_t) {
    sample_lines<Tile, IN>(work.image, zeros, s, run, b.lines + run.start);
  });
  for (int64_t z_point = 0; z_point < Tile::Z_POINTS; ++z_point) {
    sample_block<Tile, IN>(s, b, z_point);
    multiply_block(s, b, work.weights, z_point);
    interpolate_block<Tile, OUT>(s, b, z_point);
  }
  if (work.slope == 1)
    finish_block<Tile, OUT>(work, b, Identity{});
  else if (work.slope == 0)
    finish_block<Tile, OUT>(work, b, Relu{});
  else
    finish_block<Tile, OUT>(work, b, LeakyRelu{work.slope});
}

template <class Tile, class T> bool convolve_tiles(const Work<T> &work, int64_t first, int64_t count) {
  thread_local Scratch scratch;
  const Shape &s = work.shape;
  Block b{};
  b.first = first, b.count = count;
  b.points = Tile::POINTS, b.plane_points = Tile::PLANE_POINTS;
  b.sampled_stride = pad_stride(Tile::PLANE_POINTS * s.inputs);
  b.product_stride = pad_stride(Tile::PLANE_POINTS * s.outputs);
  b.reduced_step = pad_stride(Tile::PLANE_OUTPUTS * s.outputs);
  b.reduced_stride = pad_stride(Tile::Z_POINTS * b.reduced_step);
  const int64_t line_floats = pad_stride(s.width * s.inputs);
  const int64_t run_floats = for_each_run<Tile>(s, b, [](const Run<Tile> &, int64_t) {});
  b.lines = scratch.take(line_floats + run_floats + count * (b.sampled_stride + b.product_stride + b.reduced_stride));
  if (!b.lines) return false;
  b.sampled = b.lines + run_floats, b.products = b.sampled + count * b.sampled_stride;
  b.reduced = b.products + count * b.product_stride;
  float *zeros = b.reduced + count * b.reduced_stride;
  std::memset(zeros, 0, line_floats * sizeof(float));
  constexpr int group = std::max(LANES, 8);
  if (s.inputs % group == 0)
    convolve_block<Tile, group, group>(work, reinterpret_cast<const T *>(zeros), b);
  else
    convolve_block<Tile, 8, group>(work, reinterpret_cast<const T *>(zeros), b);
  return true;
}

// Returns the number of tiles in a block, close to `target`: whole rows if possible, because rows share input lines.
int64_t choose_block_tiles(int64_t tiles, int64_t row_tiles, int64_t target, int64_t threads) {
  const int64_t thread_tiles = std::max<int64_t>((tiles + threads - 1) / threads, 1);
  if (tiles < 2 * target) return thread_tiles;
  const int64_t rows = std::max<int64_t>(1, (2 * target + row_tiles) / (2 * row_tiles)) * row_tiles;
  return std::min(rows < 2 * target ? rows : target, thread_tiles);
}

template <class Tile, class T> int convolve(const Work<T> &work, int64_t target, int threads) {
  const int64_t total_tiles = Tile::count(work.shape);
  const int64_t block_tiles = choose_block_tiles(total_tiles, Tile::wide(work.shape), target, threads);
  int failed = 0;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) reduction(| : failed)
  for (int64_t first = 0; first < total_tiles; first += block_tiles)
    failed |= !convolve_tiles<Tile>(work, first, std::min(block_tiles, total_tiles - first));
  return failed;
}

template <class T> int convolve(void *const *tensors, const int64_t *sizes, float slope, int threads) {
  const Work<T> work{{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]},
                     static_cast<const T *>(tensors[0]),
                     static_cast<const float *>(tensors[1]),
                     static_cast<const float *>(tensors[2]),
                     static_cast<T *>(tensors[3]),
                     slope};
  const int64_t target = sizes[6], tile_outputs = sizes[8];
  if (tile_outputs == 8 * 8 * 4) return convolve<Tile<8, 8, 4>>(work, target, threads);
  if (tile_outputs == 8 * 4 * 4) return convolve<Tile<8, 4, 4>>(work, target, threads);
  return convolve<Tile<4, 4, 4>>(work, target, threads);
}

} // namespace

extern "C" {

// Returns the width of the next block of weights if `left` columns (outputs) are left.
int64_t stackseg_columns(int64_t left) { return next_block_vectors(left / LANES) * LANES; }

// See `choose_block_tiles`.
int64_t stackseg_blocking(int64_t tiles, int64_t row_tiles, int64_t target, int64_t threads) {
  return choose_block_tiles(tiles, row_tiles, target, threads);
}

// tensors  image [batch, depth, height, width, inputs], weights [column block][points][inputs, columns], bias [outputs]
//          or null -> result [batch, depth, height, width, outputs]
// sizes    batch, depth, height, width, inputs, outputs, approximate number of tiles in a block, whether bfloat16,
//          number of outputs in a tile: 64 for 4x4x4, 128 for 8x4x4 or 256 for 8x8x4
// reals    slope of the activation for negative values
// Image and result are both bfloat16 or both float32; all other tensors are float32. Returns 0, or 1 if memory ran out.
int stackseg_convolve(void *const *tensors, const int64_t *sizes, const double *reals, int threads) {
  const float slope = static_cast<float>(reals[0]);
  return sizes[7] ? convolve<Bfloat16>(tensors, sizes, slope, threads)
                  : convolve<float>(tensors, sizes, slope, threads);
}
}
