// Memory that vectors are read from.

#pragma once

#include <cstdint>
#include <memory>

namespace {

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
  static constexpr size_t kLine = 64;
  std::unique_ptr<uint8_t[]> bytes_;
  T* data_ = nullptr;
};

}  // namespace
