// A weight of a program: panels of bfloat16, or of codes in few bits.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "kernels.h"
#include "stored.h"

namespace octavo {

class Weight {
 public:
  // `width`: "bfloat16", "int8" (made as rows are packed), or a stored format whose rows are kept as they are.
  // Raises std::invalid_argument for another.
  Weight(int n, int k, std::string_view width);

  int n() const { return n_; }
  int k() const { return k_; }
  int panels() const { return (n_ + kPanel - 1) / kPanel; }
  int chunks() const { return (k_ + kChunk - 1) / kChunk; }
  std::int64_t panel_bytes() const { return quantised() ? quant().panel_bytes() : std::int64_t{plain().padded_k()} * kPanel * 2; }
  std::int64_t bytes() const { return panels() * panel_bytes(); }
  bool quantised() const { return format_.has_value(); }

  // Where its bytes() lie, 64-byte aligned: someone else's memory.
  void place(void* data) { data_ = static_cast<std::uint8_t*>(data); }
  std::span<const std::uint8_t> packed() const { return {data_, static_cast<std::size_t>(bytes())}; }

  PackedWeight plain() const { return {reinterpret_cast<const bf16*>(data_), n_, k_}; }
  QuantWeight quant() const { return {data_, n_, k_, *format_}; }

  // Rows [count, k] to panels first_panel, first_panel + step, ...; threads may pack different panels at once. Rows in a stored
  // format stay as they are where that is this weight's width, else they become floats first. Raises std::invalid_argument for
  // floats, or another format, where codes of a stored one belong.
  void pack(const float* rows, int count, std::int64_t first_panel, int step);
  void pack(const StoredFormat& format, const std::uint8_t* rows, int count, std::int64_t first_panel, int step);

  // Row `row` of [n, k] as float32.
  void read(int row, float* out) const;

 private:
  std::uint8_t* panel(std::int64_t p) const { return data_ + p * panel_bytes(); }

  int n_, k_;
  const StoredFormat* stored_ = nullptr;  // whose rows it keeps
  std::optional<QuantFormat> format_;     // none: bfloat16
  std::uint8_t* data_ = nullptr;
};

}  // namespace octavo
