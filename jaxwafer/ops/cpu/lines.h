// Memory that vectors are read from.

#pragma once

#include <cstdint>
#include <memory>

namespace {

constexpr int64_t kLine = 64;  // bytes of a cache line

// Asks for the lines of `bytes` from p on, into the second-level cache: the first has too few lines on their way at once.
inline void AskFor(const uint8_t* p, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += kLine) __builtin_prefetch(p + line, 0, 2);
}

// Uninitialised elements from the start of a cache line on: loads that cross lines cost twice.
template <class T>
class Lines {
 public:
  void resize(int64_t count) {
    bytes_.reset(new uint8_t[count * sizeof(T) + kLine]);
    data_ = reinterpret_cast<T*>(bytes_.get() + kLine - reinterpret_cast<uintptr_t>(bytes_.get()) % kLine);
  }
  T* data() const { return data_; }

 private:
  std::unique_ptr<uint8_t[]> bytes_;
  T* data_ = nullptr;
};

}  // namespace
