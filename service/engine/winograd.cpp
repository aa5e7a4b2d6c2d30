// 3x3x3 convolution, stride 1, padding 1, float32, channels last: Winograd's F(4x4x4, 3x3x3) (Lavin and Gray, "Fast
// Algorithms for Convolutional Neural Networks", 2016).
//
// A 4x4x4 tile of outputs takes 216 products for each pair of channels instead of 1728, an eighth. The sampling points
// are 0, +-sqrt(1/2), +-sqrt(2) and infinity: with the usual 0, +-1, +-2 rounding errors would be ten times as large.
// Tiles are worked on in blocks whose sampled inputs fit into a core's second-level cache; the products of one block
// are 216 small matrix products, for as many outputs at a time as a register tile is wide.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace {

constexpr int EDGE = 4;  // outputs along each edge of a tile
constexpr int REACH = 6; // inputs that they depend on, and sampling points, along each edge
constexpr int POINTS = REACH * REACH * REACH;

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

inline int64_t tiles_along(int64_t size) { return (size + EDGE - 1) / EDGE; }

struct Shape {
  int64_t batch, depth, height, width, inputs, outputs;
  int64_t tiles() const { return batch * tiles_along(depth) * tiles_along(height) * tiles_along(width); }
};

// Where a tile's outputs begin. Tiles are numbered along x first, then y, z and the batch.
struct Place {
  int64_t window, z, y, x;
  Place(const Shape &s, int64_t tile) {
    x = tile % tiles_along(s.width) * EDGE, tile /= tiles_along(s.width);
    y = tile % tiles_along(s.height) * EDGE, tile /= tiles_along(s.height);
    z = tile % tiles_along(s.depth) * EDGE, window = tile / tiles_along(s.depth);
  }
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

// Rows of the matrix products are read and written side by side. Were they a multiple of 4 KiB apart, they would share
// one set of the first-level cache, which holds eight lines: hence an odd number of lines.
inline int64_t spread(int64_t count) {
  constexpr int64_t line = 64 / sizeof(float);
  return ((count + line - 1) / line | 1) * line;
}

constexpr float ROOT_2 = 1.41421356237309504880f, ROOT_HALF = ROOT_2 / 2;

// B^T d: six inputs in a row -> their values at the points 0, sqrt(2), -sqrt(2), sqrt(1/2), -sqrt(1/2), infinity.
inline void sample(const Group d[REACH], Group t[REACH]) {
  const Group even = d[4] - 0.5f * d[2], odd = d[3] - 0.5f * d[1];
  const Group even2 = d[4] - 2 * d[2], odd2 = d[3] - 2 * d[1];
  t[0] = d[0] - 2.5f * d[2] + d[4];
  t[1] = even + ROOT_2 * odd;
  t[2] = even - ROOT_2 * odd;
  t[3] = even2 + ROOT_HALF * odd2;
  t[4] = even2 - ROOT_HALF * odd2;
  t[5] = d[1] - 2.5f * d[3] + d[5];
}

// A^T m: six products -> four outputs in a row.
inline void interpolate(const Group m[REACH], Group s[EDGE]) {
  const Group even = m[1] + m[2], odd = ROOT_2 * (m[1] - m[2]), even2 = m[3] + m[4], odd2 = ROOT_HALF * (m[3] - m[4]);
  s[0] = m[0] + even + even2;
  s[1] = odd + odd2;
  s[2] = 2 * even + 0.5f * even2;
  s[3] = 2 * odd + 0.5f * odd2 + m[5];
}

// The voxels that a row of tiles depends on, sampled along z: lines[y][z point][x, inputs], x from `left` to `right`.
struct Lines {
  const float *start;
  int64_t stride, left, right;
};

// Floats that `sample_lines` writes at most, for so many tiles.
int64_t lines_size(const Shape &s, int64_t tiles) {
  return REACH * REACH * spread(std::min(s.width, tiles * EDGE + 2) * s.inputs);
}

// Six lines are read side by side from end to end, which the hardware foresees. It does not foresee 36 lines that are
// read column by column, and where they are a multiple of 4 KiB apart, they also push each other out of the caches.
Lines sample_lines(const float *image, const float *zeros, const Shape &s, const Place &at, int64_t count, float *out) {
  const int64_t left = std::max<int64_t>(at.x - 1, 0), right = std::min(at.x + count * EDGE + 1, s.width);
  const int64_t length = (right - left) * s.inputs, stride = spread(length);
  for (int64_t j = 0; j < REACH; ++j, out += REACH * stride) {
    const int64_t y = at.y - 1 + j;
    const float *lines[REACH];
    for (int64_t i = 0; i < REACH; ++i) {
      const int64_t z = at.z - 1 + i;
      const bool inside = z >= 0 && z < s.depth && y >= 0 && y < s.height;
      lines[i] = inside ? image + (((at.window * s.depth + z) * s.height + y) * s.width + left) * s.inputs : zeros;
    }
    for (int64_t c = 0; c < length; c += GROUP) {
      Group d[REACH], t[REACH];
      for (int i = 0; i < REACH; ++i) d[i] = load(lines[i] + c);
      sample(d, t);
      for (int i = 0; i < REACH; ++i) store(out + i * stride + c, t[i]);
    }
  }
  return {out - REACH * REACH * stride, stride, left, right};
}

// One x of the lines, sampled along y: G groups of channels.
template <int G> void sample_column(const float *in, int64_t stride, Group out[REACH * REACH][G]) {
  for (int i = 0; i < REACH; ++i)
    for (int g = 0; g < G; ++g) {
      Group d[REACH], t[REACH];
      for (int j = 0; j < REACH; ++j) d[j] = load(in + (j * REACH + i) * stride + g * GROUP);
      sample(d, t);
      for (int j = 0; j < REACH; ++j) out[i * REACH + j][g] = t[j];
    }
}

// Tiles beside each other along x -> sampled[count, stride ...][POINTS, inputs], for G groups of channels.
template <int G>
void sample_row(const Lines &lines, const Shape &s, int64_t left, int64_t count, int64_t channel, float *sampled,
                int64_t stride) {
  // The last six columns, in turn: two of them are those of the next tile too.
  alignas(64) Group columns[REACH][REACH * REACH][G];
  for (int64_t tile = 0; tile < count; ++tile, sampled += stride) {
    const int64_t first = tile * EDGE;
    for (int64_t column = first + (tile ? REACH - EDGE : 0); column < first + REACH; ++column) {
      const int64_t x = left - 1 + column;
      Group(*out)[G] = columns[column % REACH];
      if (x < lines.left || x >= lines.right)
        std::memset(static_cast<void *>(out), 0, sizeof(columns[0]));
      else
        sample_column<G>(lines.start + (x - lines.left) * s.inputs + channel, lines.stride, out);
    }
    const Group(*taps[REACH])[G];
    for (int k = 0; k < REACH; ++k) taps[k] = columns[(first + k) % REACH];
    for (int p = 0; p < REACH * REACH; ++p)
      for (int g = 0; g < G; ++g) {
        Group d[REACH], t[REACH];
        for (int k = 0; k < REACH; ++k) d[k] = taps[k][p][g];
        sample(d, t);
        for (int k = 0; k < REACH; ++k) store(sampled + (p * REACH + k) * s.inputs + channel + g * GROUP, t[k]);
      }
  }
}

// A block of tiles -> sampled[count, stride ...][POINTS, inputs]; `zeros` are as many floats as a line of the image.
void sample_tiles(const float *image, const float *zeros, const Shape &s, int64_t first, int64_t count,
                  float *line_scratch, float *sampled, int64_t stride) {
  const int64_t across = tiles_along(s.width);
  for (int64_t done = 0; done < count;) {
    const Place at(s, first + done);
    const int64_t run = std::min(count - done, across - at.x / EDGE);
    const Lines lines = sample_lines(image, zeros, s, at, run, line_scratch);
    int64_t channel = 0;
    for (; channel + 2 * GROUP <= s.inputs; channel += 2 * GROUP) // whole lines of the cache
      sample_row<2>(lines, s, at.x, run, channel, sampled + done * stride, stride);
    if (channel < s.inputs) sample_row<1>(lines, s, at.x, run, channel, sampled + done * stride, stride);
    done += run;
  }
}

// out[row, column] = sum over channels of a[row, channel] * weights[channel, column]
template <int R, int V>
inline void multiply_tile(const float *a, int64_t stride, int64_t inputs, const float *weights, float *out,
                          int64_t out_stride) {
  Lanes sum[R][V] = {};
  for (int64_t c = 0; c < inputs; ++c) {
    const Lanes *w = reinterpret_cast<const Lanes *>(weights);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) sum[r][v] += a[r * stride + c] * w[v];
    weights += V * LANES;
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) *reinterpret_cast<Lanes *>(out + r * out_stride + v * LANES) = sum[r][v];
}

template <int R, int V>
void multiply_rows(int64_t count, const float *a, int64_t stride, int64_t inputs, const float *weights, float *out,
                   int64_t out_stride) {
  if constexpr (R > 0) {
    if (count == R)
      multiply_tile<R, V>(a, stride, inputs, weights, out, out_stride);
    else
      multiply_rows<R - 1, V>(count, a, stride, inputs, weights, out, out_stride);
  }
}

// One sampling point: a[rows, inputs] x weights[inputs, V vectors] -> out[rows, V vectors]. Register tiles are all
// about equally high, as those of one or two rows take as long as those of four.
template <int V>
void multiply(int64_t rows, const float *a, int64_t stride, int64_t inputs, const float *weights, float *out,
              int64_t out_stride) {
  for (int64_t left = (rows + ROWS - 1) / ROWS; left > 0; --left) {
    const int64_t count = (rows + left - 1) / left;
    multiply_rows<ROWS, V>(count, a, stride, inputs, weights, out, out_stride);
    rows -= count, a += count * stride, out += count * out_stride;
  }
}

// One group of channels of one tile, products[POINTS][stride ...] -> its outputs, with bias and rectifier.
void interpolate_tile(const float *products, int64_t stride, const Group &offset, const Group &floor, const Shape &s,
                      const Place &at, float *result) {
  alignas(64) Group along_x[REACH][REACH][EDGE], along_y[EDGE][EDGE][REACH];
  for (int i = 0; i < REACH; ++i)
    for (int j = 0; j < REACH; ++j) {
      Group m[REACH];
      for (int k = 0; k < REACH; ++k) m[k] = load(products + ((i * REACH + j) * REACH + k) * stride);
      interpolate(m, along_x[i][j]);
    }
  for (int i = 0; i < REACH; ++i)
    for (int x = 0; x < EDGE; ++x) {
      Group m[REACH], line[EDGE];
      for (int j = 0; j < REACH; ++j) m[j] = along_x[i][j][x];
      interpolate(m, line);
      for (int y = 0; y < EDGE; ++y) along_y[y][x][i] = line[y];
    }
  const int64_t deep = std::min<int64_t>(EDGE, s.depth - at.z), high = std::min<int64_t>(EDGE, s.height - at.y),
                wide = std::min<int64_t>(EDGE, s.width - at.x);
  const int64_t step = s.outputs, line_step = s.width * step, plane_step = s.height * line_step;
  result += (at.window * s.depth + at.z) * plane_step + at.y * line_step + at.x * step;
  for (int64_t y = 0; y < high; ++y)
    for (int64_t x = 0; x < wide; ++x) {
      Group line[EDGE];
      interpolate(along_y[y][x], line);
      float *out = result + y * line_step + x * step;
      for (int64_t z = 0; z < deep; ++z, out += plane_step) {
        const Group value = line[z] + offset;
        // Written so that NaN stays NaN: it must reach whoever looks for it.
        store(out, value < floor ? floor : value);
      }
    }
}

struct Work {
  Shape shape;
  const float *image, *weights, *bias;
  float *result;
  bool rectify;
};

// V vectors of outputs from `column` on, of a block of tiles that are sampled.
template <int V>
void convolve_columns(const Work &work, int64_t first, int64_t count, int64_t column, const float *sampled,
                      int64_t sampled_stride, float *products, int64_t product_stride) {
  const Shape &s = work.shape;
  const float *weights = work.weights + POINTS * s.inputs * column;
  const Group floor = Group{} + (work.rectify ? 0.0f : -__builtin_inff());
  for (int p = 0; p < POINTS; ++p)
    multiply<V>(count, sampled + p * s.inputs, sampled_stride, s.inputs, weights + p * s.inputs * V * LANES,
                products + p * V * LANES, product_stride);
  for (int64_t tile = 0; tile < count; ++tile) {
    const Place at(s, first + tile);
    for (int64_t k = 0; k < V * LANES; k += GROUP)
      interpolate_tile(products + tile * product_stride + k, V * LANES,
                       work.bias ? load(work.bias + column + k) : Group{}, floor, s, at, work.result + column + k);
  }
}

bool convolve_block(const Work &work, int64_t first, int64_t count) {
  thread_local Scratch scratch;
  const Shape &s = work.shape;
  constexpr int64_t wide = COLUMNS * LANES;
  const int64_t sampled_stride = spread(POINTS * s.inputs), product_stride = spread(POINTS * wide);
  const int64_t sampled_size = count * sampled_stride, product_size = count * product_stride;
  const int64_t line = s.width * s.inputs;
  float *sampled = scratch.take(sampled_size + product_size + line + lines_size(s, count));
  if (!sampled) return false;
  float *products = sampled + sampled_size, *zeros = products + product_size;
  std::memset(zeros, 0, line * sizeof(float));
  sample_tiles(work.image, zeros, s, first, count, zeros + line, sampled, sampled_stride);
  int64_t column = 0;
  for (; column + wide <= s.outputs; column += wide)
    convolve_columns<COLUMNS>(work, first, count, column, sampled, sampled_stride, products, product_stride);
  for (; column < s.outputs; column += LANES)
    convolve_columns<1>(work, first, count, column, sampled, sampled_stride, products, product_stride);
  return true;
}

} // namespace

extern "C" {

// Columns of weights that lie together: blocks of this many, the last ones in blocks of `stackseg_vector`.
int stackseg_columns() { return COLUMNS * LANES; }
int stackseg_vector() { return LANES; }

// image [batch, depth, height, width, inputs], weights [column block][216][inputs, columns], bias [outputs] or null
// -> result [batch, depth, height, width, outputs], `tiles` at a time. Returns 0, or 1 where memory ran out.
int stackseg_convolve(const float *image, const float *weights, const float *bias, float *result, int64_t batch,
                      int64_t depth, int64_t height, int64_t width, int64_t inputs, int64_t outputs, int64_t tiles,
                      int rectify, int threads) {
  const Work work{{batch, depth, height, width, inputs, outputs}, image, weights, bias, result, rectify != 0};
  const int64_t all = work.shape.tiles();
  int failed = 0;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) reduction(| : failed)
  for (int64_t first = 0; first < all; first += tiles)
    failed |= !convolve_block(work, first, std::min(tiles, all - first));
  return failed;
}
}
