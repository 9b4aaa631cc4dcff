// Which tables this machine can run: the processor has the instructions and the operating system keeps their registers.
#include "kernels.h"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace octavo {
namespace {

#if defined(__x86_64__)

struct Leaf {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Leaf cpuid(unsigned leaf, unsigned subleaf) {
  Leaf l;
  __get_cpuid_count(leaf, subleaf, &l.eax, &l.ebx, &l.ecx, &l.edx);  // leaves zeros when there is no such leaf
  return l;
}

bool bit(std::uint64_t word, int i) { return (word >> i & 1) != 0; }

// XCR0: the register states that the operating system saves; 0 when it cannot be asked.
std::uint64_t saved_states() {
  if (!bit(cpuid(1, 0).ecx, 27)) return 0;  // OSXSAVE
  std::uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return std::uint64_t{high} << 32 | low;
}

bool has_states(std::uint64_t mask) { return (saved_states() & mask) == mask; }

bool has_avx2() {
  const unsigned c = cpuid(1, 0).ecx;
  return has_states(0x6) && bit(c, 12) && bit(c, 29) && bit(cpuid(7, 0).ebx, 5);  // SSE and AVX state; FMA; F16C; AVX2
}

bool has_avx512() {
  const unsigned b = cpuid(7, 0).ebx;
  return has_avx2() && has_states(0xe6) && bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31);  // F, DQ, BW, VL
}

bool has_avx512_vnni() { return has_avx512() && bit(cpuid(7, 0).ecx, 11); }

bool has_avx512_bf16() { return has_avx512_vnni() && cpuid(7, 0).eax >= 1 && bit(cpuid(7, 1).eax, 5); }

// Linux hands out the 8 KiB of tile state only to processes that ask; the permission holds for all threads.
[[maybe_unused]] bool ask_for_tiles() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

#if defined(OCTAVO_EMULATE_TILES)
bool has_amx() { return has_avx512_bf16(); }
#else
bool has_amx() {
  const unsigned d = cpuid(7, 0).edx;
  return has_avx512_bf16() && has_states(0x60000) && bit(d, 24) && bit(d, 25) && bit(d, 22) &&  // TILE, INT8, BF16
         ask_for_tiles();
}
#endif

#endif

struct Candidate {
  const Kernels* table;
  bool (*runs)();
};

constexpr Candidate kCandidates[] = {
    {&kPortable, [] { return true; }},
#if defined(__x86_64__)
    {&kAvx2, has_avx2},
    {&kAvx512, has_avx512},
    {&kAvx512Vnni, has_avx512_vnni},
    {&kAvx512Bf16, has_avx512_bf16},
    {&kAmx, has_amx},
#endif
};

}  // namespace

int available(const Kernels** out, int capacity) {
  int count = 0;
  for (const Candidate& c : kCandidates)
    if (count < capacity && c.runs()) out[count++] = c.table;
  return count;
}

const Kernels& fast_math(const Kernels& table) {
#if defined(__x86_64__)
  if (&table == &kAvx512Bf16) return kAvx512Bf16Dots;
#endif
  return table;
}

const Kernels* find(const char* name) {
#if defined(__x86_64__)
  if (std::strcmp(kAvx512Bf16Dots.name, name) == 0) return has_avx512_bf16() ? &kAvx512Bf16Dots : nullptr;
#endif
  for (const Candidate& c : kCandidates)
    if (std::strcmp(c.table->name, name) == 0) return c.runs() ? c.table : nullptr;
  return nullptr;
}

}  // namespace octavo
