// Prefetching of lines that are read or written a few lines later.

#pragma once

#include <cstdint>

namespace {

// Lines are too short for the hardware prefetcher to predict the start of the next line, so they are prefetched explicitly,
// this number of lines ahead.
constexpr int64_t AHEAD = 16;
constexpr int64_t AHEAD_IN_ROWS = 8;
constexpr uintptr_t CACHE_LINE = 64;

template <bool ToWrite, typename T> inline void fetch(const T *from, int64_t count) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(from), end = begin + count * sizeof(T);
  for (uintptr_t line = begin & -CACHE_LINE; line < end; line += CACHE_LINE)
    __builtin_prefetch(reinterpret_cast<const void *>(line), ToWrite);
}

} // namespace
