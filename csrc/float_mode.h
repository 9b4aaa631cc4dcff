// Subnormals are flushed wherever kernels run: AMX always does, so every other instruction set has to be told to.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace octavo {

// While one lives, its thread reads subnormals as zero and writes zero in their place; the earlier mode comes back after.
class FlushSubnormals {
 public:
  FlushSubnormals() : before_(read()) { write(before_ | kFlush); }
  ~FlushSubnormals() { write(before_); }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
#if defined(__x86_64__)
  using Word = unsigned int;
  static constexpr Word kFlush = 0x8040;  // MXCSR: FTZ (results) and DAZ (operands)
  static Word read() { return _mm_getcsr(); }
  static void write(Word mode) { _mm_setcsr(mode); }
#elif defined(__aarch64__)
  using Word = std::uint64_t;
  static constexpr Word kFlush = Word{1} << 24;  // FPCR.FZ: both
  static Word read() {
    Word mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void write(Word mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
#else
#error "octavo runs on x86-64 and on 64-bit Arm"
#endif

  Word before_;
};

}  // namespace octavo
