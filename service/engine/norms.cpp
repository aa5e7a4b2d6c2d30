// Instance and group norms of volumes whose channels are last, with the activation behind them.
//
// Voxels are taken in chunks that stay in a core's first-level cache: of each the means of its channels first, then the
// squared distances from them, which keeps the digits that a sum of squares loses where means are large. Chunks are put
// together in double precision, in the same order whatever the number of threads (Chan, Golub and LeVeque 1983).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace {

constexpr int GROUP = 8; // channels of a vector
constexpr int ROWS = 4;  // voxels that are summed side by side, as one sum alone would wait for itself
constexpr int64_t CHUNK = 4096, LEAST_VOXELS = 32;

typedef float Group __attribute__((vector_size(GROUP * sizeof(float)), aligned(4), may_alias));

inline Group load(const float *p) { return *reinterpret_cast<const Group *>(p); }
inline void store(float *p, Group v) { *reinterpret_cast<Group *>(p) = v; }

// Adds f(value) of a vector of channels of each voxel to `sums`, `stride` from voxel to voxel.
template <int N, typename F> inline void sum_vectors(const float *x, int64_t voxels, int64_t stride, Group sums[N], F f) {
  Group parts[ROWS][N] = {};
  int64_t v = 0;
  for (; v + ROWS <= voxels; v += ROWS)
    for (int r = 0; r < ROWS; ++r) f(load(x + (v + r) * stride), parts[r]);
  for (; v < voxels; ++v) f(load(x + v * stride), parts[0]);
  for (int k = 0; k < N; ++k) sums[k] = (parts[0][k] + parts[1][k]) + (parts[2][k] + parts[3][k]);
}

// Mean of each channel, and the sum of squared distances from it. What the distances from a first mean sum up to is
// what its rounding left out.
void measure(const float *x, int64_t voxels, int64_t channels, float *mean, float *squares) {
  const float count = static_cast<float>(voxels);
  int64_t c = 0;
  for (; c + GROUP <= channels; c += GROUP) {
    Group sum[1], rest[2];
    sum_vectors<1>(x + c, voxels, channels, sum, [](Group value, Group *s) { s[0] += value; });
    const Group middle = sum[0] / count;
    sum_vectors<2>(x + c, voxels, channels, rest, [&](Group value, Group *s) {
      const Group distance = value - middle;
      s[0] += distance, s[1] += distance * distance;
    });
    store(mean + c, middle + rest[0] / count);
    store(squares + c, rest[1] - rest[0] * rest[0] / count);
  }
  for (; c < channels; ++c) {
    double sum = 0, square = 0;
    for (int64_t v = 0; v < voxels; ++v) sum += x[v * channels + c];
    const double middle = sum / count;
    for (int64_t v = 0; v < voxels; ++v) square += (x[v * channels + c] - middle) * (x[v * channels + c] - middle);
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

// Of one window: what its chunks were measured to be -> mean and factor of each channel.
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

// NaN stays NaN, as it must reach whoever looks for it.
template <bool ACTIVATE>
void apply(const Norm &n, const float *x, int64_t voxels, const float *middle, const float *factor, float *y) {
  int64_t c = 0;
  for (; c + GROUP <= n.channels; c += GROUP) {
    const Group shift = load(middle + c), scale = load(factor + c);
    const Group offset = n.bias ? load(n.bias + c) : Group{}, slope = ACTIVATE ? load(n.slope + c) : Group{};
    for (int64_t v = 0; v < voxels; ++v) {
      const Group value = (load(x + v * n.channels + c) - shift) * scale + offset;
      store(y + v * n.channels + c, ACTIVATE ? (value < 0 ? value * slope : value) : value);
    }
  }
  for (; c < n.channels; ++c)
    for (int64_t v = 0; v < voxels; ++v) {
      const float value = (x[v * n.channels + c] - middle[c]) * factor[c] + (n.bias ? n.bias[c] : 0.0f);
      y[v * n.channels + c] = ACTIVATE && value < 0 ? value * n.slope[c] : value;
    }
}

} // namespace

extern "C" {

// x -> y, both [batch, voxels, channels]: x less the mean of its group of channels, over the square root of variance
// plus eps, times weight plus bias (each [channels] or null), and what is negative times slope ([channels] or null).
// Returns 0, or 1 where memory ran out.
int stackseg_normalise(const float *x, const float *weight, const float *bias, const float *slope, float *y,
                       int64_t batch, int64_t voxels, int64_t channels, int64_t groups, double eps, int threads) {
  const Norm n{batch, voxels, channels, groups, eps, weight, bias, slope};
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
      if (slope)
        apply<true>(n, x + start, n.length(k), middle, scale, y + start);
      else
        apply<false>(n, x + start, n.length(k), middle, scale, y + start);
    }
  }
  return 0;
}
}
