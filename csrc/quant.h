// Weights at their file's own width: from stored rows to the panels of kernels.h, and back to numbers.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "stored.h"

namespace octavo {

// What `quantization="int8"` makes of any weight: a scale for every 32 k's of a column, and codes within +-127 around 128.
constexpr QuantFormat kInt8{Codes::k8, kChunk, 128, false, Scales::kFloat};

// Packs `count` rows (columns of the product) of a stored format, side by side, into panels: row i becomes column i % 16 of the
// panel at `out` + i / 16 * `step` panels. `w` gives format and k; w.data is not read.
void pack_stored_panels(const QuantWeight& w, const StoredFormat& format, const std::uint8_t* rows, int count, std::uint8_t* out,
                        int step);

// The same from float32 rows [count, k], quantised to kInt8: scale = max |w| / 127, code = w / scale to nearest even.
void pack_int8_panels(const QuantWeight& w, const float* rows, int count, std::uint8_t* out, int step);

// Column `column` as float32 [k]: the numbers that the file holds.
void unpack_column(const QuantWeight& w, int column, float* out);

}  // namespace octavo
