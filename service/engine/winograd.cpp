// 3x3x3 convolution, stride 1, padding 1, float32, channels last: Winograd's F(4x4, 3x3) within the planes (Lavin and
// Gray, "Fast Algorithms for Convolutional Neural Networks", 2016), the three taps along z summed directly.
//
// A 4x4 patch of outputs takes 36 products for each pair of channels instead of 144, so a quarter of the
// multiplications is left. Transforming along z too would save more of them but read and write more than it saves.
// Patches are worked on in blocks whose transformed inputs and products fit into a core's second-level cache; the
// products of one block are 36 small matrix products, with the three planes of z side by side as one long sum.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace {

constexpr int POINTS = 36; // 6 x 6 sampling points of a patch
constexpr int EDGE = 4;    // outputs along each edge of a patch

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int ROWS = 12; // rows of a register tile: ROWS x 2 vectors of sums, 2 of weights, the rest broadcast
#elif defined(__AVX2__)
constexpr int LANES = 8;
constexpr int ROWS = 6;
#else
constexpr int LANES = 4;
constexpr int ROWS = 6;
#endif
constexpr int COLUMNS = 2; // vectors of a register tile

// Channels that are transformed together; every channel count must be a multiple.
constexpr int GROUP = 8;

typedef float Lanes __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));
typedef float Group __attribute__((vector_size(GROUP * sizeof(float)), aligned(4), may_alias));

inline Group load(const float *p) { return *reinterpret_cast<const Group *>(p); }
inline void store(float *p, Group v) { *reinterpret_cast<Group *>(p) = v; }

struct Shape {
  int64_t batch, depth, height, width, inputs, outputs;
};

// How the work is cut: a block is `planes` outputs deep and `tile_rows` patches high, and as wide as the volume.
struct Blocking {
  int64_t planes, tile_rows, tile_columns;
  int64_t tiles() const { return tile_rows * tile_columns; }
};

// One thread's scratch memory, kept between calls.
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

// The 36 points of a patch are written side by side. Were they a multiple of 4 KiB apart, they would share one set of the
// first-level cache, which holds eight lines: hence an odd number of lines.
inline int64_t spread(int64_t count) {
  constexpr int64_t line = 64 / sizeof(float);
  return ((count + line - 1) / line | 1) * line;
}

// B^T d: six inputs in a row -> their values at the six sampling points (0, 1, -1, 2, -2, infinity).
inline void sample(const Group d[6], Group t[6]) {
  const Group even = d[4] - 4 * d[2], odd = d[3] - 4 * d[1];
  const Group even2 = d[4] - d[2], odd2 = 2 * (d[3] - d[1]);
  t[0] = 4 * d[0] - 5 * d[2] + d[4];
  t[1] = even + odd;
  t[2] = even - odd;
  t[3] = even2 + odd2;
  t[4] = even2 - odd2;
  t[5] = 4 * d[1] - 5 * d[3] + d[5];
}

// A^T m: six products -> four outputs in a row.
inline void interpolate(const Group m[6], Group s[4]) {
  const Group even = m[1] + m[2], odd = m[1] - m[2], even2 = m[3] + m[4], odd2 = m[3] - m[4];
  s[0] = m[0] + even + even2;
  s[1] = odd + 2 * odd2;
  s[2] = even + 4 * even2;
  s[3] = odd + 8 * odd2 + m[5];
}

// Rows of patches of one input plane -> sampled[36][stride ...][tile_rows, tile_columns, inputs]; `plane` null: zeros.
void sample_plane(const float *plane, const Shape &s, const Blocking &b, int64_t first_row, float *rows, float *sampled,
                  int64_t stride) {
  const int64_t tile_bytes = b.tiles() * s.inputs * sizeof(float);
  if (!plane) {
    for (int p = 0; p < POINTS; ++p) std::memset(sampled + p * stride, 0, tile_bytes);
    return;
  }
  const int64_t columns = b.tile_columns * EDGE + 2, line = s.width * s.inputs;
  for (int64_t tile_row = 0; tile_row < b.tile_rows; ++tile_row) {
    const int64_t top = (first_row + tile_row) * EDGE - 1;
    for (int64_t column = 0; column < columns; ++column) {
      const int64_t x = column - 1;
      float *out = rows + column * s.inputs;
      if (x < 0 || x >= s.width) {
        for (int i = 0; i < 6; ++i) std::memset(out + i * columns * s.inputs, 0, s.inputs * sizeof(float));
        continue;
      }
      for (int64_t c = 0; c < s.inputs; c += GROUP) {
        Group d[6], t[6];
        for (int i = 0; i < 6; ++i) {
          const int64_t y = top + i;
          d[i] = y < 0 || y >= s.height ? Group{} : load(plane + y * line + x * s.inputs + c);
        }
        sample(d, t);
        for (int i = 0; i < 6; ++i) store(out + i * columns * s.inputs + c, t[i]);
      }
    }
    for (int i = 0; i < 6; ++i)
      for (int64_t tile = 0; tile < b.tile_columns; ++tile) {
        const float *in = rows + (i * columns + tile * EDGE) * s.inputs;
        float *out = sampled + i * 6 * stride + (tile_row * b.tile_columns + tile) * s.inputs;
        for (int64_t c = 0; c < s.inputs; c += GROUP) {
          Group d[6], t[6];
          for (int j = 0; j < 6; ++j) d[j] = load(in + j * s.inputs + c);
          sample(d, t);
          for (int j = 0; j < 6; ++j) store(out + j * stride + c, t[j]);
        }
      }
  }
}

// products[row, column] = sum over taps and channels of sampled[row + tap, channel] * weights[tap, channel, column]
template <int R, int V>
inline void multiply_tile(const float *a, int64_t inputs, int64_t tap_stride, const float *weights, float *out,
                          int64_t outputs) {
  Lanes sum[R][V] = {};
  for (int tap = 0; tap < 3; ++tap) {
    const float *row = a + tap * tap_stride;
    for (int64_t c = 0; c < inputs; ++c) {
      const Lanes *w = reinterpret_cast<const Lanes *>(weights);
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) sum[r][v] += row[r * inputs + c] * w[v];
      weights += V * LANES;
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) *reinterpret_cast<Lanes *>(out + r * outputs + v * LANES) = sum[r][v];
}

template <int R, int V>
void multiply_rest(int64_t count, const float *a, int64_t inputs, int64_t tap_stride, const float *weights, float *out,
                   int64_t outputs) {
  if constexpr (R > 0) {
    if (count == R)
      multiply_tile<R, V>(a, inputs, tap_stride, weights, out, outputs);
    else
      multiply_rest<R - 1, V>(count, a, inputs, tap_stride, weights, out, outputs);
  }
}

template <int V>
void multiply_columns(int64_t rows, const float *a, int64_t inputs, int64_t tap_stride, const float *weights,
                      float *out, int64_t outputs) {
  int64_t row = 0;
  for (; row + ROWS <= rows; row += ROWS)
    multiply_tile<ROWS, V>(a + row * inputs, inputs, tap_stride, weights, out + row * outputs, outputs);
  multiply_rest<ROWS - 1, V>(rows - row, a + row * inputs, inputs, tap_stride, weights, out + row * outputs, outputs);
}

// One sampling point: sampled[rows + taps, inputs] x weights[columns / vectors, 3 * inputs, vectors] -> [rows, outputs].
void multiply(int64_t rows, const float *a, const Shape &s, int64_t tap_stride, const float *weights, float *out) {
  constexpr int64_t wide = COLUMNS * LANES;
  int64_t column = 0;
  for (; column + wide <= s.outputs; column += wide, weights += 3 * s.inputs * wide)
    multiply_columns<COLUMNS>(rows, a, s.inputs, tap_stride, weights, out + column, s.outputs);
  for (; column < s.outputs; column += LANES, weights += 3 * s.inputs * LANES)
    multiply_columns<1>(rows, a, s.inputs, tap_stride, weights, out + column, s.outputs);
}

// products[36][stride ...][tiles, outputs] -> one output plane, with bias and rectifier.
void interpolate_plane(const float *products, int64_t stride, const float *bias, bool rectify, const Shape &s,
                       const Blocking &b, int64_t first_row, float *plane) {
  const Group floor = Group{} + (rectify ? 0.0f : -__builtin_inff());
  for (int64_t tile = 0; tile < b.tiles(); ++tile) {
    const int64_t top = (first_row + tile / b.tile_columns) * EDGE, left = tile % b.tile_columns * EDGE;
    const int64_t high = std::min<int64_t>(EDGE, s.height - top), wide = std::min<int64_t>(EDGE, s.width - left);
    for (int64_t k = 0; k < s.outputs; k += GROUP) {
      Group half[EDGE][6];
      for (int j = 0; j < 6; ++j) {
        Group m[6], column[EDGE];
        for (int i = 0; i < 6; ++i) m[i] = load(products + (i * 6 + j) * stride + tile * s.outputs + k);
        interpolate(m, column);
        for (int i = 0; i < EDGE; ++i) half[i][j] = column[i];
      }
      const Group offset = bias ? load(bias + k) : Group{};
      for (int64_t y = 0; y < high; ++y) {
        Group row[EDGE];
        interpolate(half[y], row);
        float *out = plane + ((top + y) * s.width + left) * s.outputs + k;
        for (int64_t x = 0; x < wide; ++x) {
          const Group value = row[x] + offset;
          // Written so that NaN stays NaN: it must reach whoever looks for it.
          store(out + x * s.outputs, value < floor ? floor : value);
        }
      }
    }
  }
}

// Blocks of planes of one column of patches: outputs first_plane .. last_plane of rows of patches from first_row on.
bool run_column(const float *image, const float *weights, const float *bias, bool rectify, const Shape &s, Blocking b,
                int64_t first_row, int64_t first_plane, int64_t last_plane, float *result) {
  thread_local Scratch scratch;
  b.tile_rows = std::min(b.tile_rows, (s.height + EDGE - 1) / EDGE - first_row);
  const int64_t tap_stride = b.tiles() * s.inputs;
  const int64_t sampled_stride = spread((b.planes + 2) * tap_stride);
  const int64_t product_stride = spread(b.planes * b.tiles() * s.outputs);
  const int64_t rows_size = 6 * (b.tile_columns * EDGE + 2) * s.inputs;
  float *sampled = scratch.take(POINTS * (sampled_stride + product_stride) + rows_size);
  if (!sampled) return false;
  float *products = sampled + POINTS * sampled_stride, *rows = products + POINTS * product_stride;
  const int64_t in_plane = s.height * s.width * s.inputs, out_plane = s.height * s.width * s.outputs;

  for (int64_t z = first_plane; z < last_plane; z += b.planes) {
    const int64_t planes = std::min(b.planes, last_plane - z);
    int64_t known = 0;
    if (z > first_plane) { // the last two planes of the block before
      for (int p = 0; p < POINTS; ++p) {
        float *at = sampled + p * sampled_stride;
        std::memmove(at, at + b.planes * tap_stride, 2 * tap_stride * sizeof(float));
      }
      known = 2;
    }
    for (int64_t i = known; i < planes + 2; ++i) {
      const int64_t source = z - 1 + i;
      const bool inside = source >= 0 && source < s.depth;
      sample_plane(inside ? image + source * in_plane : nullptr, s, b, first_row, rows, sampled + i * tap_stride,
                   sampled_stride);
    }
    for (int p = 0; p < POINTS; ++p)
      multiply(planes * b.tiles(), sampled + p * sampled_stride, s, tap_stride, weights + p * 3 * s.inputs * s.outputs,
               products + p * product_stride);
    for (int64_t i = 0; i < planes; ++i)
      interpolate_plane(products + i * b.tiles() * s.outputs, product_stride, bias, rectify, s, b, first_row,
                        result + (z + i) * out_plane);
  }
  return true;
}

} // namespace

extern "C" {

// Columns of weights that lie together: blocks of this many, the last ones in blocks of `stackseg_vector`.
int stackseg_columns() { return COLUMNS * LANES; }
int stackseg_vector() { return LANES; }

// image [batch, depth, height, width, inputs], weights [36][column block][3, inputs, columns], bias [outputs] or null
// -> result [batch, depth, height, width, outputs]. Returns 0, or 1 where memory ran out.
int stackseg_convolve(const float *image, const float *weights, const float *bias, float *result, int64_t batch,
                      int64_t depth, int64_t height, int64_t width, int64_t inputs, int64_t outputs, int64_t planes,
                      int64_t tile_rows, int rectify, int threads) {
  const Shape s{batch, depth, height, width, inputs, outputs};
  const Blocking b{planes, tile_rows, (width + EDGE - 1) / EDGE};
  const int64_t tile_rows_all = (height + EDGE - 1) / EDGE;
  const int64_t columns = (tile_rows_all + tile_rows - 1) / tile_rows, blocks = (depth + planes - 1) / planes;
  // Cutting along z repeats two planes per cut, so only as often as the threads need.
  const int64_t wanted = threads > 1 ? (2 * threads + batch * columns - 1) / (batch * columns) : 1;
  const int64_t cuts = std::clamp<int64_t>(wanted, 1, blocks);
  int failed = 0;
#pragma omp parallel for collapse(3) schedule(dynamic, 1) num_threads(threads) reduction(| : failed)
  for (int64_t n = 0; n < batch; ++n)
    for (int64_t cut = 0; cut < cuts; ++cut)
      for (int64_t column = 0; column < columns; ++column) {
        const int64_t first = blocks * cut / cuts * planes, last = std::min(blocks * (cut + 1) / cuts * planes, depth);
        failed |= !run_column(image + n * depth * height * width * inputs, weights, bias, rectify != 0, s, b,
                              column * tile_rows, first, last, result + n * depth * height * width * outputs);
      }
  return failed;
}
}
