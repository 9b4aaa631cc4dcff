// The formats in which GGUF files store rows: as codes with scales and minima, or as float32 with the same bits as
// octavo/weights/quants.py, which reads every format and says where each comes from. Here are those that models are mostly
// stored in, so that loading one is quick.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "kernels.h"

namespace octavo {

// 32 values of a row: (code - offset) * (scale * scales[i]) + minimum * minima[i], where i is 1 for the last 16 values of formats
// with groups of 16. Scale and minimum are those of the whole block; what it has smaller ones for is whole numbers.
struct StoredGroup {
  std::uint8_t codes[kChunk];
  float scale, minimum;
  std::int8_t scales[2], minima[2];

  float scale_at(int i) const { return scale * static_cast<float>(scales[i]); }
  float minimum_at(int i) const { return minimum * static_cast<float>(minima[i]); }
};

struct StoredFormat {
  const char* name;  // as in quants.py
  int values;        // of a block; a row is a whole number of blocks
  int bytes;
  QuantFormat quant;  // at which its blocks can stay as they are
  void (*read)(const std::uint8_t* block, StoredGroup* out);  // values / 32 groups; null for formats of plain numbers
  void (*widen)(const std::uint8_t* value, float* out);       // of those: one number

  bool quantised() const { return read != nullptr; }
  // One block as float32.
  void decode(const std::uint8_t* block, float* out) const;
};

constexpr int kMostGroups = 8;  // of a block

std::span<const StoredFormat> stored_formats();

// Raises std::invalid_argument where there is none of that name.
const StoredFormat& stored_format(std::string_view name);

}  // namespace octavo
