// The one-dimensional transforms of Winograd's F(4, 3) and F(8, 3).
//
// F(4, 3) samples at 0, +-sqrt(1/2), +-sqrt(2) and infinity. For outputs of the order of 1, F(4x4x4, 3x3x3) has
// rounding errors of up to 1e-5 with these points, and of up to 1.1e-4 with the usual points 0, +-1, +-2 and infinity.
//
// F(8, 3) samples at 0, +-NEAR, +-1/NEAR, +-FAR, +-1/FAR and infinity. These values of NEAR and FAR have the smallest
// rounding errors: up to 4e-5 for F(8x4x4, 3x3x3) and up to 2.4e-4 for F(8x8x4, 3x3x3). Because the points are pairs of
// reciprocals, all of them share the sums of the polynomials x^4 - NEAR_SUM x^2 + 1 and x^4 - FAR_SUM x^2 + 1.

#pragma once

namespace {

constexpr float ROOT_2 = 1.41421356237309504880f, ROOT_HALF = ROOT_2 / 2;

constexpr float NEAR = 1.25f, FAR = 2.4f;
constexpr float NEAR_SQUARE = NEAR * NEAR, FAR_SQUARE = FAR * FAR;
constexpr float NEAR_SUM = NEAR_SQUARE + 1 / NEAR_SQUARE, FAR_SUM = FAR_SQUARE + 1 / FAR_SQUARE;

// B^T d: six consecutive inputs -> values at the points 0, sqrt(2), -sqrt(2), sqrt(1/2), -sqrt(1/2), infinity.
template <class V> [[gnu::always_inline]] inline void sample(const V (&d)[6], V (&t)[6]) {
  const V even = d[4] - 0.5f * d[2], odd = d[3] - 0.5f * d[1];
  const V even2 = d[4] - 2 * d[2], odd2 = d[3] - 2 * d[1];
  t[0] = d[0] - 2.5f * d[2] + d[4];
  t[1] = even + ROOT_2 * odd;
  t[2] = even - ROOT_2 * odd;
  t[3] = even2 + ROOT_HALF * odd2;
  t[4] = even2 - ROOT_HALF * odd2;
  t[5] = d[1] - 2.5f * d[3] + d[5];
}

// A^T m: six products -> four consecutive outputs.
template <class V> [[gnu::always_inline]] inline void interpolate(const V (&m)[6], V (&s)[4]) {
  const V even = m[1] + m[2], odd = ROOT_2 * (m[1] - m[2]), even2 = m[3] + m[4], odd2 = ROOT_HALF * (m[3] - m[4]);
  s[0] = m[0] + even + even2;
  s[1] = odd + odd2;
  s[2] = 2 * even + 0.5f * even2;
  s[3] = 2 * odd + 0.5f * odd2 + m[5];
}

// Computes the values at +-point from the sums that do not contain the factor of the points +-point and +-1/point.
template <class V> [[gnu::always_inline]] inline void sample_pair(const V *sums, float point, V *t) {
  const float inverse_square = 1 / (point * point);
  const V even = sums[3] - inverse_square * sums[1], odd = sums[2] - inverse_square * sums[0];
  t[0] = even + point * odd;
  t[1] = even - point * odd;
}

// B^T d: ten consecutive inputs -> values at the points 0, NEAR, -NEAR, 1/NEAR, -1/NEAR, FAR, -FAR, 1/FAR, -1/FAR,
// infinity.
template <class V> [[gnu::always_inline]] inline void sample(const V (&d)[10], V (&t)[10]) {
  V without_far[6], without_near[4];
#pragma GCC unroll 6
  for (int i = 0; i < 6; ++i) without_far[i] = (d[i] + d[i + 4]) - FAR_SUM * d[i + 2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) without_near[i] = (d[i + 1] + d[i + 5]) - NEAR_SUM * d[i + 3];
  t[0] = without_far[0] + without_far[4] - NEAR_SUM * without_far[2];
  sample_pair(without_far + 1, NEAR, t + 1);
  sample_pair(without_far + 1, 1 / NEAR, t + 3);
  sample_pair(without_near, FAR, t + 5);
  sample_pair(without_near, 1 / FAR, t + 7);
  t[9] = without_far[1] + without_far[5] - NEAR_SUM * without_far[3];
}

constexpr float power(float base, int exponent) { return exponent ? base * power(base, exponent - 1) : 1; }

// Returns the terms of the output number EXPONENT: NEAR^EXPONENT * v[0] + NEAR^-EXPONENT * v[1] + FAR^EXPONENT * v[2] +
// FAR^-EXPONENT * v[3].
template <int EXPONENT, class V> [[gnu::always_inline]] inline V add_powers(const V (&v)[4]) {
  constexpr float near = power(NEAR, EXPONENT), far = power(FAR, EXPONENT);
  return near * v[0] + (1 / near) * v[1] + far * v[2] + (1 / far) * v[3];
}

// A^T m: ten products -> eight consecutive outputs.
template <class V> [[gnu::always_inline]] inline void interpolate(const V (&m)[10], V (&s)[8]) {
  const V even[4] = {m[1] + m[2], m[3] + m[4], m[5] + m[6], m[7] + m[8]};
  const V odd[4] = {m[1] - m[2], m[3] - m[4], m[5] - m[6], m[7] - m[8]};
  s[0] = m[0] + add_powers<0>(even);
  s[1] = add_powers<1>(odd);
  s[2] = add_powers<2>(even);
  s[3] = add_powers<3>(odd);
  s[4] = add_powers<4>(even);
  s[5] = add_powers<5>(odd);
  s[6] = add_powers<6>(even);
  s[7] = add_powers<7>(odd) + m[9];
}

} // namespace
