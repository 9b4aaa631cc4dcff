// What every vec_*.h shares.
//
// A vec_*.h defines `Vec` (16 float lanes), the shape of register blocks (kBlockRows, kTogether) and the operations on them;
// the kernels are written once over these names. Everything in this folder lives in an unnamed namespace: a function of one
// instruction set must never be merged by the linker with its namesake of another. For the same reason nothing here uses
// templates or inline functions of the standard library.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace octavo {
namespace {

constexpr std::uint32_t kSignBit = 0x80000000u;
constexpr std::uint32_t kInfinityBits = 0x7f800000u;
constexpr std::uint32_t kSmallestNormalBits = 0x00800000u;
constexpr std::uint32_t kNanBits = 0x7fc0u;  // the one NaN that is written as bfloat16

constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, which then stands in the low bits
constexpr std::int32_t kMagicBits = 0x4b400000;

}  // namespace
}  // namespace octavo
