// Zeroed memory straight from the operating system, 64-byte aligned; a page is committed when it is first written.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

namespace octavo {

class Memory {
 public:
  Memory() = default;
  // Raises std::bad_alloc. Large pages make long streams cheaper, but 2 MiB are committed at a time: not for what is written a
  // few bytes here and there.
  explicit Memory(std::size_t bytes, bool large_pages = false) : bytes_(bytes) {
    if (bytes == 0) return;
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
    if (large_pages) madvise(data, bytes, MADV_HUGEPAGE);  // only advice: a kernel without them does without
    data_ = data;
  }
  // What is written there goes to a file, which must be as long, and which the system writes out as it sees fit.
  static Memory of_file(int descriptor, std::size_t bytes) { return map(descriptor, bytes, PROT_READ | PROT_WRITE); }

  // A file to be read, of at least so many bytes; processes that map it share the memory.
  static Memory view_of_file(int descriptor, std::size_t bytes) {
    Memory memory = map(descriptor, bytes, PROT_READ);
    madvise(memory.data_, bytes, MADV_HUGEPAGE);
    madvise(memory.data_, bytes, MADV_WILLNEED);  // the disk may begin
    return memory;
  }
  ~Memory() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }
  Memory(Memory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Memory& operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  std::size_t bytes() const { return bytes_; }

 private:
  static Memory map(int descriptor, std::size_t bytes, int access) {
    void* data = mmap(nullptr, bytes, access, MAP_SHARED, descriptor, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
    Memory memory;
    memory.data_ = data;
    memory.bytes_ = bytes;
    return memory;
  }

  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Memory in large chunks, so that what is too small for a large page of its own gets one with its neighbours. Freed as a whole.
class Arena {
 public:
  // 64-byte aligned. Raises std::bad_alloc.
  void* take(std::size_t bytes) {
    const std::size_t size = (bytes + 63) / 64 * 64;
    if (chunks_.empty() || size > chunks_.back().bytes() - used_) {
      chunks_.emplace_back((size > kChunkBytes ? size : kChunkBytes) + kLargePage, true);
      const auto begin = reinterpret_cast<std::uintptr_t>(chunks_.back().as<char>());
      used_ = (kLargePage - begin % kLargePage) % kLargePage;
    }
    void* taken = chunks_.back().as<char>() + used_;
    used_ += size;
    return taken;
  }

 private:
  static constexpr std::size_t kLargePage = 2 << 20, kChunkBytes = 64 << 20;  // pages that nobody writes are never committed
  std::vector<Memory> chunks_;
  std::size_t used_ = 0;  // of the last chunk
};

}  // namespace octavo
