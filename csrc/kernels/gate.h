// Elementwise kernels.
#pragma once

namespace octavo {
namespace {

inline void gate_mul(const GateMul& g, std::int64_t row_begin, std::int64_t row_end) {
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    for (int i = 0; i < g.width; i += kLanes) {
      const int left = g.width - i;
      Vec gate[1] = {load(g.gate.row(row) + i, left)};
      g.f == Gate::kSilu ? silu(gate) : gelu(gate);
      store(g.out.row(row) + i, gate[0] * load(g.up.row(row) + i, left), left);
    }
  }
}

inline void add(const Add& a, std::int64_t row_begin, std::int64_t row_end) {
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    for (int i = 0; i < a.width; i += kLanes) {
      const int left = a.width - i;
      store(a.out.row(row) + i, load(a.a.row(row) + i, left) + load(a.b.row(row) + i, left), left);
    }
  }
}

// How many of the elements from i on go through one Vec.
OCTAVO_INLINE int lanes_left(std::int64_t count, std::int64_t i) {
  return count - i < kLanes ? static_cast<int>(count - i) : kLanes;
}

inline void softcap(float* x, std::int64_t count, float cap) {
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const int left = lanes_left(count, i);
    store(x + i, soft_cap(load(x + i, left), splat(cap)), left);
  }
}

inline void to_bf16(const float* x, bf16* y, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const int left = lanes_left(count, i);
    store(y + i, load(x + i, left), left);
  }
}

}  // namespace
}  // namespace octavo
