// Replay of a captured forward pass: calls kernels one after the other, without returning to Python in between.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "simd.hpp"

namespace {

constexpr int64_t MAX_TENSORS = 8; // maximum number of tensors per kernel call

typedef int (*Kernel)(void *const *tensors, const int64_t *sizes, const double *reals, int threads);

template <class T> void add(const T *a, const T *b, T *y, int64_t count, int threads) {
#pragma omp parallel for simd schedule(static) num_threads(threads)
  for (int64_t i = 0; i < count; ++i) store_one(y + i, load_one(a + i) + load_one(b + i));
}

} // namespace

extern "C" {

// tensors  a, b -> a + b, all with the same layout
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

// calls           for each kernel call: the address of the function; the numbers of tensors, sizes and reals; the place
//                 of each tensor and its offset within that place in bytes; the sizes; the reals
// call_count      number of calls
// base_addresses  base address of each place; the first is null, for tensors at a fixed address
// Returns the first nonzero status, or 0.
int stackseg_replay(const int64_t *calls, int64_t call_count, void *const *base_addresses, int threads) {
  for (; call_count > 0; --call_count) {
    const Kernel kernel = reinterpret_cast<Kernel>(calls[0]);
    const int64_t tensor_count = calls[1], size_count = calls[2], real_count = calls[3];
    const int64_t *location = calls + 4, *sizes = location + 2 * tensor_count;
    void *tensors[MAX_TENSORS];
    for (int64_t t = 0; t < tensor_count; ++t, location += 2)
      tensors[t] = reinterpret_cast<void *>(reinterpret_cast<uintptr_t>(base_addresses[location[0]]) + location[1]);
    const double *reals = reinterpret_cast<const double *>(sizes + size_count);
    if (const int status = kernel(tensors, sizes, reals, threads)) return status;
    calls = sizes + size_count + real_count;
  }
  return 0;
}
}
