// Instance and group norms for channels last, fused with the activation that follows. Inputs and outputs are float32 or
// bfloat16; computation is in float32.
//
// ATen and inductor convert images to the contiguous layout and back, which makes a norm as expensive as a convolution:
// ATen's instance norm takes five times as long as this one. Here, voxels are processed in chunks that fit in a core's
// first-level cache. The moments of a chunk are computed in two passes: first the means of the channels, then the
// squared deviations from the means. A plain sum of squares would lose precision for large means: if the mean is five
// standard deviations, the error of ATen's group norm is 1e-3, and the error of this norm is 5e-7. Chunks are combined
// in double precision, in an order that does not depend on the number of threads (Chan, Golub and LeVeque 1983).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "simd.hpp"

namespace {

#if defined(__AVX512F__)
constexpr int MAX_LANES = 16; // maximum number of channels in a vector
#else
constexpr int MAX_LANES = 8;
#endif
constexpr int PARTIAL_SUMS = 4; // number of independent sums; additions to a single sum would wait for each other
constexpr int64_t CHUNK_ELEMENTS = 4096; // approximate number of elements in a chunk
constexpr int64_t MIN_CHUNK_VOXELS = 32;

// Sums f(value) over all voxels, for a vector of channels. `stride` is the distance between voxels.
template <int N, int SUMS, class T, class F>
inline void sum_vectors(const T *x, int64_t voxels, int64_t stride, Floats<N> sums[SUMS], F f) {
  Floats<N> partial_sums[PARTIAL_SUMS][SUMS] = {};
  int64_t v = 0;
  for (; v + PARTIAL_SUMS <= voxels; v += PARTIAL_SUMS)
    for (int r = 0; r < PARTIAL_SUMS; ++r) f(load<N>(x + (v + r) * stride), partial_sums[r]);
  for (; v < voxels; ++v) f(load<N>(x + v * stride), partial_sums[0]);
  for (int k = 0; k < SUMS; ++k)
    sums[k] = (partial_sums[0][k] + partial_sums[1][k]) + (partial_sums[2][k] + partial_sums[3][k]);
}

// Computes the means of a vector of channels, and the sums of squared deviations from the means. The sum of the
// deviations corrects the rounding error of the mean.
template <int N, class T>
void measure_vector(const T *x, int64_t voxels, int64_t channels, float *mean, float *squares) {
  const float count = static_cast<float>(voxels);
  Floats<N> sum[1], deviation_sums[2];
  sum_vectors<N, 1>(x, voxels, channels, sum, [](Floats<N> value, Floats<N> *s) { s[0] += value; });
  const Floats<N> rounded_mean = sum[0] / count;
  sum_vectors<N, 2>(x, voxels, channels, deviation_sums, [&](Floats<N> value, Floats<N> *s) {
    const Floats<N> deviation = value - rounded_mean;
    s[0] += deviation, s[1] += deviation * deviation;
  });
  store<N>(mean, rounded_mean + deviation_sums[0] / count);
  store<N>(squares, deviation_sums[1] - deviation_sums[0] * deviation_sums[0] / count);
}

// Computes the means of all channels, and the sums of squared deviations from the means.
template <class T> void measure(const T *x, int64_t voxels, int64_t channels, float *mean, float *squares) {
  int64_t c = 0;
  for (; c + MAX_LANES <= channels; c += MAX_LANES)
    measure_vector<MAX_LANES>(x + c, voxels, channels, mean + c, squares + c);
  for (; c + 8 <= channels; c += 8) measure_vector<8>(x + c, voxels, channels, mean + c, squares + c);
  for (; c < channels; ++c) {
    double sum = 0, square_sum = 0;
    for (int64_t v = 0; v < voxels; ++v) sum += load_one(x + v * channels + c);
    const double channel_mean = sum / static_cast<double>(voxels);
    for (int64_t v = 0; v < voxels; ++v) {
      const double deviation = load_one(x + v * channels + c) - channel_mean;
      square_sum += deviation * deviation;
    }
    mean[c] = static_cast<float>(channel_mean), squares[c] = static_cast<float>(square_sum);
  }
}

struct Norm {
  int64_t batch, voxels, channels, groups;
  double eps;
  const float *weight, *bias, *slope;

  // Number of voxels in all chunks but the last.
  int64_t chunk_voxels() const { return std::max(CHUNK_ELEMENTS / channels, MIN_CHUNK_VOXELS); }
  int64_t chunk_count() const { return (voxels + chunk_voxels() - 1) / chunk_voxels(); }
  // Number of voxels in one chunk.
  int64_t length(int64_t index) const { return std::min(chunk_voxels(), voxels - index * chunk_voxels()); }
};

// Combines the moments of a window's chunks into the shift and the scale of each channel.
void combine(const Norm &n, const float *means, const float *squares, double *mean, double *square, float *shift,
             float *scale) {
  std::fill(mean, mean + n.channels, 0.0), std::fill(square, square + n.channels, 0.0);
  for (int64_t k = 0; k < n.chunk_count(); ++k)
    for (int64_t c = 0; c < n.channels; ++c) mean[c] += static_cast<double>(means[k * n.channels + c]) * n.length(k);
  for (int64_t c = 0; c < n.channels; ++c) mean[c] /= static_cast<double>(n.voxels);
  for (int64_t k = 0; k < n.chunk_count(); ++k)
    for (int64_t c = 0; c < n.channels; ++c) {
      const double deviation = means[k * n.channels + c] - mean[c];
      square[c] += squares[k * n.channels + c] + n.length(k) * deviation * deviation;
    }
  const int64_t group_channels = n.channels / n.groups;
  for (int64_t first = 0; first < n.channels; first += group_channels) {
    double group_mean = 0, variance_sum = 0;
    for (int64_t c = first; c < first + group_channels; ++c) group_mean += mean[c];
    group_mean /= static_cast<double>(group_channels);
    for (int64_t c = first; c < first + group_channels; ++c)
      variance_sum += square[c] / static_cast<double>(n.voxels) + (mean[c] - group_mean) * (mean[c] - group_mean);
    const double group_scale = 1 / std::sqrt(variance_sum / static_cast<double>(group_channels) + n.eps);
    for (int64_t c = first; c < first + group_channels; ++c) {
      shift[c] = static_cast<float>(group_mean);
      scale[c] = static_cast<float>(n.weight ? group_scale * n.weight[c] : group_scale);
    }
  }
}

// Affine map and activation for one channel or a vector of channels.
template <bool HAS_ACTIVATION, class V> struct Affine {
  V shift, scale, offset, slope;
  // NaN stays NaN, because non-finite scores must remain detectable.
  V operator()(V x) const {
    const V value = (x - shift) * scale + offset;
    return HAS_ACTIVATION ? (value < 0.0f ? value * slope : value) : value;
  }
};

template <bool HAS_ACTIVATION, int N, class T>
void apply_vector(const Norm &n, const T *x, int64_t voxels, const float *shift, const float *scale, int64_t c,
                  T *y) {
  typedef Floats<N> V;
  const Affine<HAS_ACTIVATION, V> affine{load<N>(shift + c), load<N>(scale + c), n.bias ? load<N>(n.bias + c) : V{},
                                         HAS_ACTIVATION ? load<N>(n.slope + c) : V{}};
  for (int64_t at = c; at < voxels * n.channels; at += n.channels) store<N>(y + at, affine(load<N>(x + at)));
}

template <bool HAS_ACTIVATION, class T>
void apply(const Norm &n, const T *x, int64_t voxels, const float *shift, const float *scale, T *y) {
  int64_t c = 0;
  for (; c + MAX_LANES <= n.channels; c += MAX_LANES)
    apply_vector<HAS_ACTIVATION, MAX_LANES>(n, x, voxels, shift, scale, c, y);
  for (; c + 8 <= n.channels; c += 8) apply_vector<HAS_ACTIVATION, 8>(n, x, voxels, shift, scale, c, y);
  for (; c < n.channels; ++c) {
    const Affine<HAS_ACTIVATION, float> affine{shift[c], scale[c], n.bias ? n.bias[c] : 0.0f,
                                               HAS_ACTIVATION ? n.slope[c] : 0.0f};
    for (int64_t at = c; at < voxels * n.channels; at += n.channels) store_one(y + at, affine(load_one(x + at)));
  }
}

template <class T> int normalize(const Norm &n, const T *x, T *y, int threads) {
  const int64_t batch = n.batch, voxels = n.voxels, channels = n.channels;
  const int64_t window_chunks = n.chunk_count(), total_chunks = batch * window_chunks;
  const std::unique_ptr<float[]> moments(new (std::nothrow) float[2 * total_chunks * channels]);
  const std::unique_ptr<float[]> affine_terms(new (std::nothrow) float[2 * batch * channels]);
  const std::unique_ptr<double[]> window_moments(new (std::nothrow) double[2 * batch * channels]);
  if (!moments || !affine_terms || !window_moments) return 1;
  float *means = moments.get(), *squares = means + total_chunks * channels;
  float *shifts = affine_terms.get(), *scales = shifts + batch * channels;
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t chunk = 0; chunk < total_chunks; ++chunk) {
      const int64_t window = chunk / window_chunks, k = chunk % window_chunks;
      measure(x + (window * voxels + k * n.chunk_voxels()) * channels, n.length(k), channels, means + chunk * channels,
              squares + chunk * channels);
    }
#pragma omp for schedule(static)
    for (int64_t window = 0; window < batch; ++window) {
      double *mean = window_moments.get() + 2 * window * channels;
      combine(n, means + window * window_chunks * channels, squares + window * window_chunks * channels, mean,
              mean + channels, shifts + window * channels, scales + window * channels);
    }
#pragma omp for schedule(static)
    for (int64_t chunk = 0; chunk < total_chunks; ++chunk) {
      const int64_t window = chunk / window_chunks, k = chunk % window_chunks;
      const int64_t start = (window * voxels + k * n.chunk_voxels()) * channels;
      const float *shift = shifts + window * channels, *scale = scales + window * channels;
      if (n.slope)
        apply<true>(n, x + start, n.length(k), shift, scale, y + start);
      else
        apply<false>(n, x + start, n.length(k), shift, scale, y + start);
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
int stackseg_normalize(void *const *tensors, const int64_t *sizes, const double *reals, int threads) {
  const auto *weight = static_cast<const float *>(tensors[1]), *bias = static_cast<const float *>(tensors[2]),
             *slope = static_cast<const float *>(tensors[3]);
  const Norm n{sizes[0], sizes[1], sizes[2], sizes[3], reals[0], weight, bias, slope};
  if (sizes[4])
    return normalize(n, static_cast<const Bfloat16 *>(tensors[0]), static_cast<Bfloat16 *>(tensors[4]), threads);
  return normalize(n, static_cast<const float *>(tensors[0]), static_cast<float *>(tensors[4]), threads);
}
}
