#include "quant.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

namespace octavo {

namespace {

// Halves that came from halves go back as they were; NaNs lose their payload.
std::uint16_t to_half(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = bits >> 16 & 0x8000u, exponent = bits >> 23 & 255u, mantissa = bits & 0x7fffffu;
  if (exponent == 255) return static_cast<std::uint16_t>(sign | (mantissa == 0 ? 0x7c00u : 0x7e00u));
  if (exponent >= 113) return static_cast<std::uint16_t>(sign | (exponent - 112) << 10 | mantissa >> 13);
  return static_cast<std::uint16_t>(sign | static_cast<std::uint32_t>(std::fabs(x) * 0x1p24f));  // a multiple of 2^-24
}
float from_half(std::uint16_t h) {
  const std::uint32_t sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31u, mantissa = h & 0x3ffu;
  if (exponent == 0) return std::copysign(static_cast<float>(mantissa) * 0x1p-24f, sign == 0 ? 1.0f : -1.0f);
  return std::bit_cast<float>(sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13);
}

void put_half(std::uint8_t* halves, int index, float value) {
  const std::uint16_t bits = to_half(value);
  std::memcpy(halves + index * 2, &bits, sizeof bits);
}
float get_half(const std::uint8_t* halves, int index) {
  std::uint16_t bits;
  std::memcpy(&bits, halves + index * 2, sizeof bits);
  return from_half(bits);
}

// Scales or minima: `factor` times the whole number `scale`.
void put(std::uint8_t* scales, int index, Scales type, float factor, std::int8_t scale) {
  const float value = factor * static_cast<float>(scale);
  switch (type) {
    case Scales::kHalf: put_half(scales, index, value); break;
    case Scales::kFloat: std::memcpy(scales + index * 4, &value, sizeof value); break;
    case Scales::kWhole: scales[index] = static_cast<std::uint8_t>(scale); break;
  }
}
float get(const std::uint8_t* scales, int index, Scales type, const std::uint8_t* factors) {
  float value;
  switch (type) {
    case Scales::kHalf: return get_half(scales, index);
    case Scales::kWhole: return get_half(factors, index % kPanel) * static_cast<float>(static_cast<std::int8_t>(scales[index]));
    case Scales::kFloat: break;
  }
  std::memcpy(&value, scales + index * 4, sizeof value);
  return value;
}

// Where the factors of a chunk's super-block lie in a panel, and the chunk itself.
std::int64_t factors_at(const QuantFormat& f, int chunk) { return f.super_offset(chunk / kSuperChunks * kSuperChunks); }
std::int64_t chunk_at(const QuantFormat& f, int chunk) {
  return factors_at(f, chunk) + f.factor_bytes() + chunk % kSuperChunks * f.chunk_bytes();
}

constexpr int kQuads = kChunk / 4, kQuadBytes = 4 * kPanel;

// Sixteen columns' codes of a chunk as quads, which then share bytes as the format says.
void pack_codes(const QuantFormat& format, const std::uint8_t (&codes)[kPanel][kChunk], std::uint8_t* out) {
  std::uint8_t quads[kQuads][kQuadBytes];
  for (int q = 0; q < kQuads; ++q) {
    for (int c = 0; c < kPanel; ++c) std::memcpy(quads[q] + 4 * c, codes[c] + 4 * q, 4);
  }
  if (format.codes == Codes::k8) {
    std::memcpy(out, quads, sizeof quads);
    return;
  }
  for (int q = 0; q < kQuads / 2; ++q, out += kQuadBytes) {
    for (int i = 0; i < kQuadBytes; ++i) out[i] = static_cast<std::uint8_t>((quads[q][i] & 15) | quads[q + 4][i] << 4);
  }
  if (format.codes == Codes::k5) {
    std::memset(out, 0, kQuadBytes);
    for (int q = 0; q < kQuads; ++q) {
      for (int i = 0; i < kQuadBytes; ++i) out[i] = static_cast<std::uint8_t>(out[i] | (quads[q][i] >> 4 & 1) << q);
    }
  } else if (format.codes == Codes::k6) {
    std::memset(out, 0, 2 * kQuadBytes);
    for (int q = 0; q < kQuads; ++q) {
      std::uint8_t* plane = out + q / 4 * kQuadBytes;
      for (int i = 0; i < kQuadBytes; ++i) plane[i] = static_cast<std::uint8_t>(plane[i] | (quads[q][i] >> 4 & 3) << (q % 4 * 2));
    }
  }
}

// Code i of column c.
int code_at(const QuantFormat& format, const std::uint8_t* chunk, int c, int i) {
  const int q = i / 4, at = 4 * c + i % 4;
  if (format.codes == Codes::k8) return chunk[q * kQuadBytes + at];
  const int nibble = chunk[q % 4 * kQuadBytes + at] >> (q / 4 * 4) & 15;
  const std::uint8_t* high = chunk + 4 * kQuadBytes;
  switch (format.codes) {
    case Codes::k5: return nibble | (high[at] >> q & 1) << 4;
    case Codes::k6: return nibble | (high[q / 4 * kQuadBytes + at] >> (q % 4 * 2) & 3) << 4;
    case Codes::kTable: return kNonLinear[nibble];
    default: return nibble;
  }
}

// Writes one chunk of up to 16 columns; what is past them has scale zero.
struct ChunkWriter {
  const QuantWeight& w;
  std::uint8_t* panel;

  void write(int chunk, const StoredGroup* const (&groups)[kPanel]) const {
    std::uint8_t codes[kPanel][kChunk];
    const QuantFormat& f = w.format;
    std::uint8_t *place = panel + chunk_at(f, chunk), *factors = panel + factors_at(f, chunk);
    std::uint8_t *scales = place + f.code_bytes(), *minima = scales + f.scale_bytes();
    constexpr StoredGroup kNothing{};
    for (int c = 0; c < kPanel; ++c) {
      const StoredGroup& group = groups[c] != nullptr ? *groups[c] : kNothing;
      std::memcpy(codes[c], group.codes, kChunk);
      for (int g = 0; g < f.groups(); ++g) {
        put(scales, g * kPanel + c, f.scales, group.scale, group.scales[g]);
        if (f.has_minimum) put(minima, g * kPanel + c, f.scales, group.minimum, group.minima[g]);
      }
      if (f.factor_bytes() == 0 || chunk % kSuperChunks != 0) continue;
      put_half(factors, c, group.scale);
      if (f.has_minimum) put_half(factors, kPanel + c, group.minimum);
    }
    pack_codes(f, codes, place);
  }
};

// Calls write(panel, columns, first row) for each panel of `count` rows.
template <class Write>
void for_panels(const QuantWeight& w, int count, std::uint8_t* out, int step, Write write) {
  for (int row = 0; row < count; row += kPanel, out += step * w.panel_bytes()) write(out, std::min(kPanel, count - row), row);
}

constexpr float kToWhole = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number

// The largest |w| becomes 127; without one, all codes stand for zero. NaN stays NaN, in the scale.
StoredGroup int8_group(const float* w, int count) {
  StoredGroup group{};
  float most = 0;
  for (int i = 0; i < count; ++i) most = std::fabs(w[i]) <= most ? most : std::fabs(w[i]);  // NaN is kept
  group.scale = most / 127.0f;
  group.scales[0] = 1;
  const bool usable = std::isfinite(most) && group.scale >= 0x1p-126f;
  if (std::isfinite(most) && !usable) group.scale = 0;
  for (int i = 0; i < kChunk; ++i) {
    const float code = usable && i < count ? (w[i] / group.scale + kToWhole) - kToWhole : 0.0f;
    group.codes[i] = static_cast<std::uint8_t>(128 + static_cast<int>(code));
  }
  return group;
}

}  // namespace

void pack_stored_panels(const QuantWeight& w, const StoredFormat& format, const std::uint8_t* rows, int count, std::uint8_t* out,
                        int step) {
  const int blocks = w.k / format.values, groups = format.values / kChunk;
  const std::int64_t row_bytes = std::int64_t{blocks} * format.bytes;
  StoredGroup read[kPanel][kMostGroups];
  for_panels(w, count, out, step, [&](std::uint8_t* panel, int columns, int first) {
    for (int block = 0; block < blocks; ++block) {
      for (int c = 0; c < columns; ++c) format.read(rows + (first + c) * row_bytes + std::int64_t{block} * format.bytes, read[c]);
      for (int g = 0; g < groups; ++g) {
        const StoredGroup* side_by_side[kPanel] = {};
        for (int c = 0; c < columns; ++c) side_by_side[c] = &read[c][g];
        ChunkWriter{w, panel}.write(block * groups + g, side_by_side);
      }
    }
  });
}

void pack_int8_panels(const QuantWeight& w, const float* rows, int count, std::uint8_t* out, int step) {
  StoredGroup made[kPanel];
  for_panels(w, count, out, step, [&](std::uint8_t* panel, int columns, int first) {
    for (int chunk = 0; chunk < w.chunks(); ++chunk) {
      const StoredGroup* side_by_side[kPanel] = {};
      for (int c = 0; c < columns; ++c) {
        const float* row = rows + std::int64_t{first + c} * w.k + chunk * kChunk;
        made[c] = int8_group(row, std::min(kChunk, w.k - chunk * kChunk));
        side_by_side[c] = &made[c];
      }
      ChunkWriter{w, panel}.write(chunk, side_by_side);
    }
  });
}

void unpack_column(const QuantWeight& w, int column, float* out) {
  const QuantFormat& f = w.format;
  const std::uint8_t* panel = w.panel(column / kPanel);
  const int c = column % kPanel;
  for (int first = 0; first < w.k; first += f.group) {
    const int group = first % kChunk / f.group, index = group * kPanel + c;
    const std::uint8_t *chunk = panel + chunk_at(f, first / kChunk), *factors = panel + factors_at(f, first / kChunk);
    const std::uint8_t *scales = chunk + f.code_bytes(), *minima = scales + f.scale_bytes();
    const float scale = get(scales, index, f.scales, factors);
    const float minimum = f.has_minimum ? get(minima, index, f.scales, factors + 2 * kPanel) : 0.0f;
    const int count = std::min(f.group, w.k - first);
    for (int i = 0; i < count; ++i) {
      const float scaled = static_cast<float>(code_at(f, chunk, c, group * f.group + i) - f.offset) * scale;
      out[first + i] = f.has_minimum ? scaled + minimum : scaled;
    }
  }
}

}  // namespace octavo
