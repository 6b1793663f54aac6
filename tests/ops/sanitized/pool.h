// A pool with one thread beside the caller, started anew for each task.

#pragma once

#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

struct Pool {
  std::vector<std::thread> threads;
  int64_t num_threads() const { return 2; }
  template <class Task>
  void Schedule(Task task) {
    threads.emplace_back(std::move(task));
  }
  ~Pool() {
    for (auto& thread : threads) thread.join();
  }
};
