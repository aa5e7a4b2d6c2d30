// Threads that help their callers. All watersheds of the process share them.
//
// A caller does not wait for a thread that has not begun to work. In an OpenMP loop, every thread would have to reach the end
// of the loop, which takes long if other threads use the cores, for example to compute windows.

#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

namespace {

class ThreadPool {
public:
  // Returns the pool of the process. It is never destroyed, because its threads run until the process ends.
  static ThreadPool &get() {
    static ThreadPool *const pool = new ThreadPool;
    return *pool;
  }

  // Calls `work(number, worker)` for the numbers from 0 to `count` - 1 on at most `threads` threads, each of which has its own
  // number `worker` from 0. Throws std::bad_alloc if a call throws it.
  void run(int threads, int64_t count, std::function<void(int64_t, int)> work) {
    const auto job = std::make_shared<Job>(count, std::move(work));
    const int helpers = static_cast<int>(std::min<int64_t>(threads, count)) - 1;
    if (helpers > 0) {
      const std::lock_guard<std::mutex> lock(mutex_);
      start_threads(helpers);
      for (int helper = 0; helper < std::min(helpers, threads_); ++helper)
        jobs_.push_back(job);
      available_.notify_all();
    }
    job->work_on();
    job->wait();
  }

private:
  struct Job {
    Job(int64_t size, std::function<void(int64_t, int)> function) : count(size), work(std::move(function)) {}

    void work_on() {
      const int worker = next_worker++;
      for (int64_t number; (number = next++) < count;) {
        try {
          work(number, worker);
        } catch (const std::bad_alloc &) {
          failed = true;
        }
        if (++done == count) {
          const std::lock_guard<std::mutex> lock(mutex);
          finished.notify_one();
        }
      }
    }

    void wait() {
      std::unique_lock<std::mutex> lock(mutex);
      finished.wait(lock, [this] { return done == count; });
      if (failed)
        throw std::bad_alloc();
    }

    const int64_t count;
    const std::function<void(int64_t, int)> work;
    std::atomic<int64_t> next{0}, done{0};
    std::atomic<int> next_worker{0};
    std::atomic<bool> failed{false};
    std::mutex mutex;
    std::condition_variable finished;
  };

  // Starts threads until there are `count`, or as many as the operating system allows.
  void start_threads(int count) {
    try {
      for (; threads_ < count; ++threads_)
        std::thread([this] { help(); }).detach();
    } catch (const std::system_error &) {
      // The callers do the work that no other thread does.
    }
  }

  void help() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      available_.wait(lock, [this] { return !jobs_.empty(); });
      const std::shared_ptr<Job> job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job->work_on();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable available_;
  std::deque<std::shared_ptr<Job>> jobs_;
  int threads_ = 0;
};

} // namespace
