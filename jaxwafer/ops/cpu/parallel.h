// Work shared among the threads of XLA's own pool.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace {

// Runs f(0) … f(count − 1) on the caller and on threads of the pool that turn up in time. The caller can finish alone
// and waits only for parts that have begun, so a pool whose threads are all busy or waiting cannot stall it.
//
// Each thread begins with a run of its own, which it reads from one end to the other: what it asks memory for ahead is
// then its own, and not what another's cache is about to hold. Who is done takes from the others' runs.
template <class Pool, class Function>
void Parallel(Pool& pool, int64_t count, const Function& f) {
  struct alignas(64) Run {
    std::atomic<int64_t> next;
    int64_t end;
  };
  struct Shared {
    explicit Shared(int64_t count) : runs(count) {}
    std::vector<Run> runs;
    alignas(64) std::atomic<int64_t> done{0};
  };
  int64_t threads = std::min<int64_t>(pool.num_threads(), count);
  if (threads <= 1) {
    for (int64_t i = 0; i < count; ++i) f(i);
    return;
  }
  auto shared = std::make_shared<Shared>(threads);
  for (int64_t t = 0; t < threads; ++t)
    shared->runs[t].next = count * t / threads, shared->runs[t].end = count * (t + 1) / threads;
  // f lives on the caller's stack: a late thread finds nothing left and does not touch it.
  auto work = [shared, threads, &f](int64_t own) {
    for (int64_t t = 0; t < threads; ++t) {
      Run& run = shared->runs[(own + t) % threads];
      for (int64_t i; (i = run.next.fetch_add(1, std::memory_order_relaxed)) < run.end;) {
        f(i);
        shared->done.fetch_add(1, std::memory_order_release);
      }
    }
  };
  for (int64_t t = 1; t < threads; ++t) pool.Schedule([work, t] { work(t); });
  work(0);
  for (int spins = 0; shared->done.load(std::memory_order_acquire) < count; ++spins)
    if (spins > 1000) std::this_thread::yield();
}

}  // namespace
