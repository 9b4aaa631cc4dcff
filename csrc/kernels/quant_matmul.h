// x @ w^T for weights in few bits (kernels.h), with the epilogues of matmul.h. A chunk's codes are unpacked into registers and
// serve a block of rows from there, so that weights are read at their own width. Panels are the outer loop: a weight comes from
// memory once for all rows.
#pragma once

namespace octavo {
namespace {

constexpr int kQuads = kChunk / 4, kQuadBytes = 4 * kPanel;

// What a kernel is compiled for; offsets and the type of scales are looked at as it runs.
template <Codes C, int Group, bool HasMinimum>
struct Format {
  static constexpr Codes kCodes = C;
  static constexpr int kGroups = kChunk / Group;
  static constexpr bool kHasMinimum = HasMinimum;
  static constexpr bool kSmall = C != Codes::k8 && C != Codes::kTable;  // codes are below 128
};

template <int Q>
OCTAVO_INLINE Bytes with_fifth(Bytes nibbles, Bytes plane) {
  return with_bits<4 - Q, 0x10>(nibbles, plane);
}
template <int Q>
OCTAVO_INLINE Bytes with_upper(Bytes nibbles, Bytes plane) {
  return with_bits<4 - 2 * Q, 0x30>(nibbles, plane);
}

// The eight quads of a chunk.
template <Codes C>
OCTAVO_INLINE void unpack(const std::uint8_t* chunk, Bytes (&u)[kQuads]) {
  if constexpr (C == Codes::k8) {
#pragma GCC unroll 8
    for (int q = 0; q < kQuads; ++q) u[q] = load_bytes(chunk + q * kQuadBytes);
    return;
  }
#pragma GCC unroll 4
  for (int q = 0; q < kQuads / 2; ++q) {
    const Bytes both = load_bytes(chunk + q * kQuadBytes);
    u[q] = low_nibbles(both);
    u[q + kQuads / 2] = high_nibbles(both);
  }
  const std::uint8_t* high = chunk + kQuads / 2 * kQuadBytes;
  if constexpr (C == Codes::k5) {
    const Bytes plane = load_bytes(high);
    u[0] = with_fifth<0>(u[0], plane), u[1] = with_fifth<1>(u[1], plane);
    u[2] = with_fifth<2>(u[2], plane), u[3] = with_fifth<3>(u[3], plane);
    u[4] = with_fifth<4>(u[4], plane), u[5] = with_fifth<5>(u[5], plane);
    u[6] = with_fifth<6>(u[6], plane), u[7] = with_fifth<7>(u[7], plane);
  }
  if constexpr (C == Codes::k6) {
    for (int half = 0; half < 2; ++half) {
      const Bytes plane = load_bytes(high + half * kQuadBytes);
      Bytes* own = u + half * (kQuads / 2);
      own[0] = with_upper<0>(own[0], plane), own[1] = with_upper<1>(own[1], plane);
      own[2] = with_upper<2>(own[2], plane), own[3] = with_upper<3>(own[3], plane);
    }
  }
  if constexpr (C == Codes::kTable) {
#pragma GCC unroll 8
    for (int q = 0; q < kQuads; ++q) u[q] = look_up(u[q], kNonLinear);
  }
}

// Scales or minima of a chunk's group; `factors` are those of its super-block.
OCTAVO_INLINE Vec load_scales(const std::uint8_t* scales, int group, Scales type, const std::uint8_t* factors) {
  if (type == Scales::kHalf) return load_half(reinterpret_cast<const std::uint16_t*>(scales) + group * kPanel);
  if (type == Scales::kFloat) return load(reinterpret_cast<const float*>(scales) + group * kPanel);
  return load_half(reinterpret_cast<const std::uint16_t*>(factors)) * to_float(load_ints(scales + group * kPanel));
}

// The whole numbers of group G of a chunk.
template <class F, int G>
OCTAVO_INLINE Ints dot_group(const Bytes (&u)[kQuads], const QuantChunk& x) {
  Ints sum = splat_int(x.initial[G]);
#pragma GCC unroll 8
  for (int q = G * kQuads / F::kGroups; q < (G + 1) * kQuads / F::kGroups; ++q) sum = dot<F::kSmall>(sum, u[q], x.codes + 4 * q);
  return sum;
}

template <class F, Activations A, int G>
OCTAVO_INLINE Vec add_group(Vec acc, const Bytes (&u)[kQuads], Vec scale, Vec minimum, const QuantChunk* x) {
  Ints sum = dot_group<F, G>(u, x[0]);
  if constexpr (A == Activations::kInt16) sum = join(sum, dot_group<F, G>(u, x[1]));
  acc = acc + scale * splat(x->scale) * to_float(sum);
  if constexpr (F::kHasMinimum) acc = acc + minimum * splat(x->sums[G]);
  return acc;
}

// A chunk's unpacked codes times its rows of whole numbers, added to the sums of R rows.
template <class F, Activations A, int R>
OCTAVO_INLINE void add_bytes(Vec (&acc)[R], const Bytes (&u)[kQuads], const Vec (&scale)[F::kGroups], const Vec (&minimum)[F::kGroups],
                             const QuantChunk* x, std::int64_t stride) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    acc[r] = add_group<F, A, 0>(acc[r], u, scale[0], minimum[0], x + r * stride);
    if constexpr (F::kGroups == 2) acc[r] = add_group<F, A, 1>(acc[r], u, scale[1], minimum[1], x + r * stride);
  }
}

// The same with activations as they are: `values` holds the chunk of each row as floats.
template <class F, int R>
OCTAVO_INLINE void add_floats(Vec (&acc)[R], const Bytes (&u)[kQuads], const Vec (&scale)[F::kGroups], const Vec (&minimum)[F::kGroups],
                              const QuantChunk* x, std::int64_t stride, const float (&values)[R * kChunk], Vec offset) {
#pragma GCC unroll 2
  for (int g = 0; g < F::kGroups; ++g) {
    Vec even[R], odd[R];
    for (int r = 0; r < R; ++r) even[r] = odd[r] = splat(0.0f);
#pragma GCC unroll 8
    for (int q = g * kQuads / F::kGroups; q < (g + 1) * kQuads / F::kGroups; ++q) {
      const Vec w[4] = {byte_of<0>(u[q]) - offset, byte_of<1>(u[q]) - offset, byte_of<2>(u[q]) - offset, byte_of<3>(u[q]) - offset};
      for (int r = 0; r < R; ++r) {
        const float* four = values + r * kChunk + 4 * q;
        even[r] = mul_add(splat(four[2]), w[2], mul_add(splat(four[0]), w[0], even[r]));
        odd[r] = mul_add(splat(four[3]), w[3], mul_add(splat(four[1]), w[1], odd[r]));
      }
    }
    for (int r = 0; r < R; ++r) {
      acc[r] = acc[r] + scale[g] * (even[r] + odd[r]);
      if constexpr (F::kHasMinimum) acc[r] = acc[r] + minimum[g] * splat(x[r * stride].sums[g]);
    }
  }
}

constexpr int kSumRows = 16;  // most rows of a block

// What a block of rows came to, panel by panel, on its way to the epilogue.
struct PanelSums {
  alignas(64) float sum[2][kSumRows][kPanel];
};

// Sums of R rows and one panel.
template <class F, Activations A, int R>
inline void sum_codes(const QuantMatmul& m, std::int64_t row, int panel, float (&sums)[kSumRows][kPanel]) {
  const QuantWeight& w = m.w;
  const std::uint8_t* data = w.panel(panel);
  const std::int64_t stride = m.x.stride;
  const QuantChunk* x = m.x.row(row);
  const std::uint8_t* factors = data;
  const Scales type = w.format.scales;
  const int chunks = w.chunks(), bytes = w.format.chunk_bytes(), factor_bytes = w.format.factor_bytes();
  const int scales = w.format.code_bytes(), minima = scales + w.format.scale_bytes();
  Vec acc[R];
  for (int r = 0; r < R; ++r) acc[r] = splat(0.0f);
  for (int chunk = 0; chunk < chunks; ++chunk, data += bytes) {
    if (chunk % kSuperChunks == 0) {
      factors = data;
      data += factor_bytes;
    }
    Bytes u[kQuads];
    unpack<F::kCodes>(data, u);
    Vec scale[F::kGroups], minimum[F::kGroups];
#pragma GCC unroll 2
    for (int g = 0; g < F::kGroups; ++g) {
      scale[g] = load_scales(data + scales, g, type, factors);
      if constexpr (F::kHasMinimum) minimum[g] = load_scales(data + minima, g, type, factors + 2 * kPanel);
    }
    if constexpr (A == Activations::kBfloat16) {
      float values[R * kChunk];
      for (int r = 0; r < R; ++r) widen(m.m.x.row(row + r) + chunk * kChunk, values + r * kChunk, kChunk);
      add_floats<F, R>(acc, u, scale, minimum, x + chunk, stride, values, splat(static_cast<float>(w.format.offset)));
    } else {
      add_bytes<F, A, R>(acc, u, scale, minimum, x + chunk * chunks_each(A), stride);
    }
  }
  for (int r = 0; r < R; ++r) store(sums[r], acc[r]);
}

// The epilogues stand here once, and not in the loops of every format.
[[gnu::noinline]] inline void finish_rows(const Matmul& m, std::int64_t row, int rows, int panel, bool pair, const PanelSums& sums) {
  for_row_blocks<kSideBySide>(0, rows, [&]<int R>(std::int64_t first) {
    const auto sum = [&](std::int64_t r, int p) { return load(sums.sum[p][first + r]); };
    if (pair) {
      finish<R, 2>(m, row + first, panel, sum);
    } else {
      finish<R, 1>(m, row + first, panel, sum);
    }
  });
}

// Rows in blocks of R, and what is left in blocks of half as many; one panel after the other, which is the order of memory.
template <class F, Activations A, int R>
inline void multiply_codes(const QuantMatmul& m, std::int64_t row, std::int64_t row_end, int panel, bool pair) {
  PanelSums sums;
  for (; row + R <= row_end; row += R) {
    for (int p = 0; p < 1 + pair; ++p) sum_codes<F, A, R>(m, row, panel + p, sums.sum[p]);
    finish_rows(m.m, row, R, panel, pair, sums);
  }
  if constexpr (R > 1) multiply_codes<F, A, R / 2>(m, row, row_end, panel, pair);
}

template <class F>
inline void multiply_format(const QuantMatmul& m, std::int64_t row_begin, std::int64_t row_end, int panel_begin, int panel_end) {
  for (int panel = panel_begin; panel < panel_end; panel += 2) {
    const bool pair = panel + 1 < panel_end;
    switch (m.activations) {
      case Activations::kInt8: multiply_codes<F, Activations::kInt8, kQuantRows>(m, row_begin, row_end, panel, pair); break;
      case Activations::kInt16: multiply_codes<F, Activations::kInt16, kQuantRows>(m, row_begin, row_end, panel, pair); break;
      case Activations::kBfloat16: multiply_codes<F, Activations::kBfloat16, kBlockRows>(m, row_begin, row_end, panel, pair); break;
    }
  }
}

// Calls f<Format>() for the format of a weight. Every format that stored.cpp names is here.
template <class Call>
OCTAVO_INLINE void with_format(const QuantFormat& f, Call&& call) {
  switch (f.codes) {
    case Codes::k4:
      if (f.group == kChunk) {
        f.has_minimum ? call.template operator()<Format<Codes::k4, 32, true>>() : call.template operator()<Format<Codes::k4, 32, false>>();
      } else {
        f.has_minimum ? call.template operator()<Format<Codes::k4, 16, true>>() : call.template operator()<Format<Codes::k4, 16, false>>();
      }
      return;
    case Codes::k5:
      f.has_minimum ? call.template operator()<Format<Codes::k5, 32, true>>() : call.template operator()<Format<Codes::k5, 32, false>>();
      return;
    case Codes::k6: call.template operator()<Format<Codes::k6, 16, false>>(); return;
    case Codes::k8: call.template operator()<Format<Codes::k8, 32, false>>(); return;
    case Codes::kTable: call.template operator()<Format<Codes::kTable, 32, false>>(); return;
  }
}

inline void quant_matmul(const QuantMatmul& m, std::int64_t row_begin, std::int64_t row_end, int panel_begin, int panel_end) {
  with_format(m.w.format, [&]<class F>() { multiply_format<F>(m, row_begin, row_end, panel_begin, panel_end); });
}

}  // namespace
}  // namespace octavo
