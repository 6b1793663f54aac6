// Work shared among the threads of XLA's own pool.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

namespace {

// Runs f(0) … f(count − 1) on the caller and on threads of the pool that turn up in time. The caller can finish alone
// and waits only for parts that have begun, so a pool whose threads are all busy or waiting cannot stall it.
template <class Pool, class Function>
void Parallel(Pool& pool, int64_t count, const Function& f) {
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
  };
  int64_t helpers = count > 1 ? std::min<int64_t>(pool.num_threads(), count) - 1 : 0;
  if (helpers <= 0) {
    for (int64_t i = 0; i < count; ++i) f(i);
    return;
  }
  auto shared = std::make_shared<Shared>();
  // f lives on the caller's stack: a late thread finds nothing left and does not touch it.
  auto work = [shared, count, &f] {
    for (int64_t i; (i = shared->next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      f(i);
      shared->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([work] { work(); });
  work();
  for (int spins = 0; shared->done.load(std::memory_order_acquire) < count; ++spins)
    if (spins > 1000) std::this_thread::yield();
}

}  // namespace
