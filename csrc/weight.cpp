#include "weight.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <vector>

#include "pack.h"
#include "quant.h"

namespace octavo {

Weight::Weight(int n, int k, std::string_view width) : n_(n), k_(k) {
  if (n <= 0 || k <= 0) throw std::invalid_argument("a weight needs rows and columns");
  if (width == "bfloat16") return;
  if (width == "int8") {
    format_ = kInt8;
    return;
  }
  stored_ = &stored_format(width);
  if (!stored_->quantised()) throw std::invalid_argument("a weight keeps codes, or becomes bfloat16");
  if (k % stored_->values != 0) throw std::invalid_argument("rows are not whole numbers of blocks");
  format_ = stored_->quant;
}

void Weight::pack(const float* rows, int count, std::int64_t first_panel, int step) {
  if (stored_ != nullptr) throw std::invalid_argument("this weight keeps the codes of its file, and takes no floats");
  if (quantised()) {
    pack_int8_panels(quant(), rows, count, panel(first_panel), step);
  } else {
    pack_panels(rows, k_, count, k_, reinterpret_cast<bf16*>(panel(first_panel)), 0, (count + kPanel - 1) / kPanel, step);
  }
}

void Weight::pack(const StoredFormat& format, const std::uint8_t* rows, int count, std::int64_t first_panel, int step) {
  if (stored_ != nullptr) {
    if (stored_ != &format) throw std::invalid_argument("rows of another format than their weight's");
    pack_stored_panels(quant(), format, rows, count, panel(first_panel), step);
    return;
  }
  if (k_ % format.values != 0) throw std::invalid_argument("rows are not whole numbers of blocks");
  const std::size_t k = k_, blocks = k / format.values;
  std::vector<float> floats(kPanel * k);
  for (int row = 0; row < count; row += kPanel, first_panel += step) {
    const int height = std::min(kPanel, count - row);
    for (std::size_t i = 0; i < height * blocks; ++i, rows += format.bytes) format.decode(rows, floats.data() + i * format.values);
    pack(floats.data(), height, first_panel, 1);
  }
}

void Weight::read(int row, float* out) const {
  if (quantised()) {
    unpack_column(quant(), row, out);
    return;
  }
  const bf16* column = plain().panel(row / kPanel) + row % kPanel * 2;
  for (int k = 0; k < k_; ++k) out[k] = std::bit_cast<float>(std::uint32_t{column[k / 2 * (2 * kPanel) + k % 2]} << 16);
}

}  // namespace octavo
