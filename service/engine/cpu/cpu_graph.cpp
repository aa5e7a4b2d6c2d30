// One forward of a network as a list of steps, all called in turn.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "simd.hpp"

namespace {

constexpr int64_t TENSORS = 8; // of a step, at most

typedef int (*Step)(void *const *tensors, const int64_t *sizes, const double *reals, int threads);

template <class T> void add(const T *a, const T *b, T *y, int64_t count, int threads) {
#pragma omp parallel for simd schedule(static) num_threads(threads)
  for (int64_t i = 0; i < count; ++i) store_one(y + i, load_one(a + i) + load_one(b + i));
}

} // namespace

extern "C" {

// tensors  a, b -> a + b, in the same order
// sizes    elements, whether bfloat16, which otherwise is float32
// Always returns 0.
int stackseg_add(void *const *tensors, const int64_t *sizes, const double *, int threads) {
  if (sizes[1])
    add(static_cast<const Bfloat16 *>(tensors[0]), static_cast<const Bfloat16 *>(tensors[1]),
        static_cast<Bfloat16 *>(tensors[2]), sizes[0], threads);
  else
    add(static_cast<const float *>(tensors[0]), static_cast<const float *>(tensors[1]),
        static_cast<float *>(tensors[2]), sizes[0], threads);
  return 0;
}

// tape   of each step: where its function is; how many tensors, sizes and reals it takes; of each tensor the place that it
//        lies in, and how many bytes from there; sizes; reals
// places where these begin; the first is null, for tensors that never move
// Returns what the first step returned that did not return 0, or 0.
int stackseg_play(const int64_t *tape, int64_t steps, void *const *places, int threads) {
  for (; steps > 0; --steps) {
    const Step step = reinterpret_cast<Step>(tape[0]);
    const int64_t tensors = tape[1], sizes = tape[2], reals = tape[3];
    const int64_t *operand = tape + 4, *size = operand + 2 * tensors;
    void *at[TENSORS];
    for (int64_t t = 0; t < tensors; ++t, operand += 2)
      at[t] = reinterpret_cast<void *>(reinterpret_cast<uintptr_t>(places[operand[0]]) + operand[1]);
    if (const int failed = step(at, size, reinterpret_cast<const double *>(size + sizes), threads)) return failed;
    tape = size + sizes + reals;
  }
  return 0;
}
}
