#pragma once

namespace octavo {
namespace {

// 1 / sqrt(mean of squares + eps) in all lanes.
template <class T>
inline Vec inverse_rms(const T* x, int width, float eps) {
  Vec squares = splat(0.0f);
  for (int i = 0; i < width; i += kLanes) {
    const Vec v = load(x + i, width - i);
    squares = squares + v * v;
  }
  return splat(1.0f) / sqrt(splat(sum(squares) / static_cast<float>(width) + eps));
}

// x and y may be the same memory.
template <class T>
inline void norm_row(const RmsNorm& n, const T* x, bf16* y) {
  for (int group = 0; group < n.groups; ++group, x += n.width, y += n.width) {
    const Vec inverse = inverse_rms(x, n.width, n.eps);
    for (int i = 0; i < n.width; i += kLanes) {
      const int left = n.width - i;
      store(y + i, (load(x + i, left) * inverse) * load(n.weight + i, left), left);
    }
  }
}

inline void rms_norm(const RmsNorm& n, std::int64_t row_begin, std::int64_t row_end) {
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    if (n.x_float.data) {
      norm_row(n, n.x_float.row(row), n.out.row(row));
    } else {
      norm_row(n, n.x.row(row), n.out.row(row));
    }
  }
}

}  // namespace
}  // namespace octavo
