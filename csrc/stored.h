// The formats in which GGUF files store rows, as float32: the same bits as octavo/weights/quants.py, which reads every format
// and says where each comes from. Here are those that models are mostly stored in, so that loading one is quick.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace octavo {

struct StoredFormat {
  const char* name;  // as in quants.py
  int values;        // of a block; a row is a whole number of blocks
  int bytes;
  void (*decode)(const std::uint8_t* block, float* out);
};

std::span<const StoredFormat> stored_formats();

// Raises std::invalid_argument where there is none of that name.
const StoredFormat& stored_format(std::string_view name);

}  // namespace octavo
