#pragma once

namespace octavo {
namespace {

// One head: both halves are read before either is written, so that x and y may be the same memory.
inline void rotate_head(const bf16* x, bf16* y, const float* cos, const float* sin, int half) {
  for (int i = 0; i < half; i += kLanes) {
    const int left = half - i;
    const Vec a = load(x + i, left), b = load(x + half + i, left);
    const Vec c = load(cos + i, left), s = load(sin + i, left);
    store(y + i, a * c - b * s, left);
    store(y + half + i, b * c + a * s, left);
  }
}

inline void rope(const Rope& r, std::int64_t row_begin, std::int64_t row_end) {
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    for (int head = 0; head < r.heads; ++head) {
      const bf16* x = r.x.row(row) + head * r.head_dim;
      bf16* y = r.out.row(row) + head * r.head_dim;
      rotate_head(x, y, r.cos + row * r.half, r.sin + row * r.half, r.half);
      if (x != y)
        for (int i = 2 * r.half; i < r.head_dim; ++i) y[i] = x[i];
    }
  }
}

}  // namespace
}  // namespace octavo
