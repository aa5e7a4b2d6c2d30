// Instance and group norms for channels last, fused with the activation that follows. Inputs and outputs are float32 or
// bfloat16; computation is in float32.
//
// ATen and inductor convert to contiguous and back, which makes a norm as expensive as a convolution: ATen's instance
// norm takes five times as long. Here, voxels are processed in chunks that fit in a core's first-level cache, in two
// passes: first the means of the channels, then the squared deviations from them. A plain sum of squares would lose
// precision for large means: if the mean is five standard deviations, the error of ATen's group norm is 1e-3, and the
// error of this one is 5e-7. Chunks are combined in double precision, in an order that does not depend on the number of
// threads (Chan, Golub and LeVeque 1983).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "simd.hpp"

namespace {

#if defined(__AVX512F__)
constexpr int WIDEST = 16; // maximum number of channels in a vector
#else
constexpr int WIDEST = 8;
#endif
constexpr int ROWS = 4;  // independent sums, because a single one would wait for each addition
constexpr int64_t CHUNK = 4096, LEAST_VOXELS = 32;

// Adds f(value) to `sums` for a vector of channels of each voxel. `stride` is the distance between voxels.
template <int N, int SUMS, class T, class F>
inline void sum_vectors(const T *x, int64_t voxels, int64_t stride, Floats<N> sums[SUMS], F f) {
  Floats<N> parts[ROWS][SUMS] = {};
  int64_t v = 0;
  for (; v + ROWS <= voxels; v += ROWS)
    for (int r = 0; r < ROWS; ++r) f(load<N>(x + (v + r) * stride), parts[r]);
  for (; v < voxels; ++v) f(load<N>(x + v * stride), parts[0]);
  for (int k = 0; k < SUMS; ++k) sums[k] = (parts[0][k] + parts[1][k]) + (parts[2][k] + parts[3][k]);
}

// Computes the means of a vector of channels, and the sums of squared deviations from them. The sum of the deviations
// corrects the rounding error of the mean.
template <int N, class T>
void measure_vector(const T *x, int64_t voxels, int64_t channels, float *mean, float *squares) {
  const float count = static_cast<float>(voxels);
  Floats<N> sum[1], rest[2];
  sum_vectors<N, 1>(x, voxels, channels, sum, [](Floats<N> value, Floats<N> *s) { s[0] += value; });
  const Floats<N> middle = sum[0] / count;
  sum_vectors<N, 2>(x, voxels, channels, rest, [&](Floats<N> value, Floats<N> *s) {
    const Floats<N> distance = value - middle;
    s[0] += distance, s[1] += distance * distance;
  });
  store<N>(mean, middle + rest[0] / count);
  store<N>(squares, rest[1] - rest[0] * rest[0] / count);
}

template <class T> void measure(const T *x, int64_t voxels, int64_t channels, float *mean, float *squares) {
  int64_t c = 0;
  for (; c + WIDEST <= channels; c += WIDEST) measure_vector<WIDEST>(x + c, voxels, channels, mean + c, squares + c);
  for (; c + 8 <= channels; c += 8) measure_vector<8>(x + c, voxels, channels, mean + c, squares + c);
  for (; c < channels; ++c) {
    double sum = 0, square = 0;
    for (int64_t v = 0; v < voxels; ++v) sum += load_one(x + v * channels + c);
    const double middle = sum / static_cast<double>(voxels);
    for (int64_t v = 0; v < voxels; ++v) {
      const double distance = load_one(x + v * channels + c) - middle;
      square += distance * distance;
    }
    mean[c] = static_cast<float>(middle), squares[c] = static_cast<float>(square);
  }
}

struct Norm {
  int64_t batch, voxels, channels, groups;
  double eps;
  const float *weight, *bias, *slope;

  int64_t chunk() const { return std::max(CHUNK / channels, LEAST_VOXELS); }
  int64_t chunks() const { return (voxels + chunk() - 1) / chunk(); }
  int64_t length(int64_t index) const { return std::min(chunk(), voxels - index * chunk()); }
};

// Combines the moments of a window's chunks into the mean and the scale of each channel.
void combine(const Norm &n, const float *means, const float *squares, double *mean, double *square, float *middle,
             float *factor) {
  std::fill(mean, mean + n.channels, 0.0), std::fill(square, square + n.channels, 0.0);
  for (int64_t k = 0; k < n.chunks(); ++k)
    for (int64_t c = 0; c < n.channels; ++c) mean[c] += static_cast<double>(means[k * n.channels + c]) * n.length(k);
  for (int64_t c = 0; c < n.channels; ++c) mean[c] /= static_cast<double>(n.voxels);
  for (int64_t k = 0; k < n.chunks(); ++k)
    for (int64_t c = 0; c < n.channels; ++c) {
      const double distance = means[k * n.channels + c] - mean[c];
      square[c] += squares[k * n.channels + c] + n.length(k) * distance * distance;
    }
  const int64_t members = n.channels / n.groups;
  for (int64_t first = 0; first < n.channels; first += members) {
    double together = 0, within = 0;
    for (int64_t c = first; c < first + members; ++c) together += mean[c];
    together /= static_cast<double>(members);
    for (int64_t c = first; c < first + members; ++c)
      within += square[c] / static_cast<double>(n.voxels) + (mean[c] - together) * (mean[c] - together);
    const double scale = 1 / std::sqrt(within / static_cast<double>(members) + n.eps);
    for (int64_t c = first; c < first + members; ++c) {
      middle[c] = static_cast<float>(together);
      factor[c] = static_cast<float>(n.weight ? scale * n.weight[c] : scale);
    }
  }
}

// Affine map and activation for one channel or a vector of channels.
template <bool ACTIVATE, class V> struct Affine {
  V shift, scale, offset, slope;
  // NaN stays NaN, because non-finite scores must remain detectable.
  V operator()(V x) const {
    const V value = (x - shift) * scale + offset;
    return ACTIVATE ? (value < 0.0f ? value * slope : value) : value;
  }
};

template <bool ACTIVATE, int N, class T>
void apply_vector(const Norm &n, const T *x, int64_t voxels, const float *middle, const float *factor, int64_t c,
                  T *y) {
  typedef Floats<N> V;
  const Affine<ACTIVATE, V> affine{load<N>(middle + c), load<N>(factor + c), n.bias ? load<N>(n.bias + c) : V{},
                                   ACTIVATE ? load<N>(n.slope + c) : V{}};
  for (int64_t at = c; at < voxels * n.channels; at += n.channels) store<N>(y + at, affine(load<N>(x + at)));
}

template <bool ACTIVATE, class T>
void apply(const Norm &n, const T *x, int64_t voxels, const float *middle, const float *factor, T *y) {
  int64_t c = 0;
  for (; c + WIDEST <= n.channels; c += WIDEST) apply_vector<ACTIVATE, WIDEST>(n, x, voxels, middle, factor, c, y);
  for (; c + 8 <= n.channels; c += 8) apply_vector<ACTIVATE, 8>(n, x, voxels, middle, factor, c, y);
  for (; c < n.channels; ++c) {
    const Affine<ACTIVATE, float> affine{middle[c], factor[c], n.bias ? n.bias[c] : 0.0f, ACTIVATE ? n.slope[c] : 0.0f};
    for (int64_t at = c; at < voxels * n.channels; at += n.channels) store_one(y + at, affine(load_one(x + at)));
  }
}

template <class T> int normalise(const Norm &n, const T *x, T *y, int threads) {
  const int64_t batch = n.batch, voxels = n.voxels, channels = n.channels;
  const int64_t chunks = n.chunks(), parts = batch * chunks;
  const std::unique_ptr<float[]> moments(new (std::nothrow) float[2 * parts * channels]);
  const std::unique_ptr<float[]> factors(new (std::nothrow) float[2 * batch * channels]);
  const std::unique_ptr<double[]> sums(new (std::nothrow) double[2 * batch * channels]);
  if (!moments || !factors || !sums) return 1;
  float *means = moments.get(), *squares = means + parts * channels;
  float *middles = factors.get(), *scales = middles + batch * channels;
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t window = part / chunks, k = part % chunks;
      measure(x + (window * voxels + k * n.chunk()) * channels, n.length(k), channels, means + part * channels,
              squares + part * channels);
    }
#pragma omp for schedule(static)
    for (int64_t window = 0; window < batch; ++window) {
      double *sum = sums.get() + 2 * window * channels;
      combine(n, means + window * chunks * channels, squares + window * chunks * channels, sum, sum + channels,
              middles + window * channels, scales + window * channels);
    }
#pragma omp for schedule(static)
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t window = part / chunks, k = part % chunks, start = (window * voxels + k * n.chunk()) * channels;
      const float *middle = middles + window * channels, *scale = scales + window * channels;
      if (n.slope)
        apply<true>(n, x + start, n.length(k), middle, scale, y + start);
      else
        apply<false>(n, x + start, n.length(k), middle, scale, y + start);
    }
  }
  return 0;
}

} // namespace

extern "C" {

// tensors  x [batch, voxels, channels], weight, bias and slope, each float32 [channels] or null -> y like x
// sizes    batch, voxels, channels, groups, 1 for bfloat16 or 0 for float32
// reals    eps
// y = (x - mean) / sqrt(variance + eps) * weight + bias, with moments over the group of channels. Negative values are
// then multiplied by slope. Returns 0, or 1 if memory ran out.
int stackseg_normalise(void *const *tensors, const int64_t *sizes, const double *reals, int threads) {
  const auto *weight = static_cast<const float *>(tensors[1]), *bias = static_cast<const float *>(tensors[2]),
             *slope = static_cast<const float *>(tensors[3]);
  const Norm n{sizes[0], sizes[1], sizes[2], sizes[3], reals[0], weight, bias, slope};
  if (sizes[4]) return normalise(n, static_cast<const Bfloat16 *>(tensors[0]), static_cast<Bfloat16 *>(tensors[4]), threads);
  return normalise(n, static_cast<const float *>(tensors[0]), static_cast<float *>(tensors[4]), threads);
}
}
