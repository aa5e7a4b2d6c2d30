// Functions that prefetch lines, which are runs of elements along x, before they are read or written.

#pragma once

#include <cstdint>

namespace {

// Number of lines between the current line and the line to prefetch, for pixels and for the sums of rows. Lines are too short
// for the hardware prefetcher to predict the start of the next line.
constexpr int64_t PREFETCH_DISTANCE = 16;
constexpr int64_t ROW_SUMS_PREFETCH_DISTANCE = 8;
constexpr uintptr_t CACHE_LINE_BYTES = 64;

// Prefetches `count` elements for reading or, if `ForWriting` is set, for writing.
template <bool ForWriting, typename T> inline void prefetch(const T *elements, int64_t count) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(elements), end = begin + count * sizeof(T);
  for (uintptr_t address = begin & -CACHE_LINE_BYTES; address < end; address += CACHE_LINE_BYTES)
    __builtin_prefetch(reinterpret_cast<const void *>(address), ForWriting);
}

} // namespace
