// The one-dimensional transforms of Winograd's F(4, 3).
//
// The sampling points are 0, +-sqrt(1/2), +-sqrt(2) and infinity. For outputs of the order of 1, F(4x4x4, 3x3x3) has
// rounding errors of up to 1e-5 with these points, and of up to 1.1e-4 with the usual points 0, +-1, +-2 and infinity.

#pragma once

namespace {

constexpr int EDGE = 4;  // number of outputs along each edge of a tile
constexpr int REACH = 6; // number of inputs that a tile depends on, and of sampling points, along each edge

constexpr float ROOT_2 = 1.41421356237309504880f, ROOT_HALF = ROOT_2 / 2;

// B^T d: six consecutive inputs -> values at the points 0, sqrt(2), -sqrt(2), sqrt(1/2), -sqrt(1/2), infinity.
template <class V> inline void sample(const V d[REACH], V t[REACH]) {
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
template <class V> inline void interpolate(const V m[REACH], V s[EDGE]) {
  const V even = m[1] + m[2], odd = ROOT_2 * (m[1] - m[2]), even2 = m[3] + m[4], odd2 = ROOT_HALF * (m[3] - m[4]);
  s[0] = m[0] + even + even2;
  s[1] = odd + odd2;
  s[2] = 2 * even + 0.5f * even2;
  s[3] = 2 * odd + 0.5f * odd2 + m[5];
}

} // namespace
