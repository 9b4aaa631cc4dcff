// A 64-bit checksum that finds damage, not forgery: a changed word always changes it, others are missed once in 2^64. As quick as
// memory is read, and the same on any number of threads.
#pragma once

#include <cstdint>
#include <span>

#include "pool.h"

namespace octavo {

using ByteSpan = std::span<const std::uint8_t>;

// Of all parts, in their order; where one part ends counts, too. A part is a whole number of 64 bytes.
std::uint64_t checksum(Pool& pool, std::span<const ByteSpan> parts);

}  // namespace octavo
