// Replay of a captured forward pass: calls kernels one after the other, without returning to Python in between.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "simd.hpp"

namespace {

constexpr int64_t MAX_TENSORS = 8; // per kernel

typedef int (*Kernel)(void *const *tensors, const int64_t *sizes, const double *reals, int threads);

template <class T> void add(const T *a, const T *b, T *y, int64_t count, int threads) {
#pragma omp parallel for simd schedule(static) num_threads(threads)
  for (int64_t i = 0; i < count; ++i) store_one(y + i, load_one(a + i) + load_one(b + i));
}

} // namespace

extern "C" {

// tensors  a, b -> a + b, in the same order
// sizes    number of elements, 1 for bfloat16 or 0 for float32
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

// calls  for each kernel call: the address of the function; the numbers of tensors, sizes and reals; the place of each
//        tensor and its offset there in bytes; the sizes; the reals
// places base address of each place; the first is null, for tensors at a fixed address
// Returns the first nonzero status, or 0.
int stackseg_replay(const int64_t *calls, int64_t count, void *const *places, int threads) {
  for (; count > 0; --count) {
    const Kernel kernel = reinterpret_cast<Kernel>(calls[0]);
    const int64_t tensors = calls[1], sizes = calls[2], reals = calls[3];
    const int64_t *operand = calls + 4, *size = operand + 2 * tensors;
    void *at[MAX_TENSORS];
    for (int64_t t = 0; t < tensors; ++t, operand += 2)
      at[t] = reinterpret_cast<void *>(reinterpret_cast<uintptr_t>(places[operand[0]]) + operand[1]);
    if (const int failed = kernel(at, size, reinterpret_cast<const double *>(size + sizes), threads)) return failed;
    calls = size + sizes + reals;
  }
  return 0;
}
}
