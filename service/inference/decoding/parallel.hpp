// Loops whose iterations run on several threads.
//
// They are not OpenMP loops, whose threads spin while they wait for each other. If other work uses the cores, a volume of
// 32 x 64 x 64 voxels takes up to 60 times as long then.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <new>
#include <thread>
#include <vector>

namespace {

// Calls `work(number, worker)` for the numbers from 0 to `count` - 1 on at most `threads` threads, each of which has its own
// number `worker` from 0. Throws std::bad_alloc if a call throws it.
template <typename Work> void run_parallel(int threads, int64_t count, const Work &work) {
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  const auto work_on = [&](int worker) {
    try {
      for (int64_t number; (number = next++) < count;)
        work(number, worker);
    } catch (const std::bad_alloc &) {
      failed = true;
    }
  };
  std::vector<std::thread> helpers;
  helpers.reserve(threads);
  try {
    for (int worker = 1; worker < std::min<int64_t>(threads, count); ++worker)
      helpers.emplace_back(work_on, worker);
  } catch (const std::exception &) {
    // There is not enough memory, or the operating system allows no more threads. The others do the work.
  }
  work_on(0);
  for (std::thread &helper : helpers)
    helper.join();
  if (failed)
    throw std::bad_alloc();
}

} // namespace
