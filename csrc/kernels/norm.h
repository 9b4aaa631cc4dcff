#pragma once

namespace octavo {
namespace {

// 1 / sqrt(mean of squares + eps) in all lanes. Squares of bfloat16 are exact, so mul_add is right.
inline Vec inverse_rms(const bf16* x, int width, float eps) {
  Vec squares = splat(0.0f);
  for (int i = 0; i < width; i += kLanes) {
    const Vec v = load(x + i, width - i);
    squares = mul_add(v, v, squares);
  }
  return splat(1.0f) / sqrt(splat(sum(squares) / static_cast<float>(width) + eps));
}

inline void rms_norm(const RmsNorm& n, std::int64_t row_begin, std::int64_t row_end) {
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    for (int group = 0; group < n.groups; ++group) {
      const bf16* x = n.x.row(row) + group * n.width;
      bf16* y = n.out.row(row) + group * n.width;
      const Vec inverse = inverse_rms(x, n.width, n.eps);
      for (int i = 0; i < n.width; i += kLanes) {
        const int left = n.width - i;
        store(y + i, (load(x + i, left) * inverse) * load(n.weight + i, left), left);
      }
    }
  }
}

}  // namespace
}  // namespace octavo
