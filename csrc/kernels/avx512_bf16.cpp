// AVX-512 with the conversion to bfloat16 (see vec_avx512.h); and a second table, which also multiplies with VDPBF16PS.
#include "kernels/bytes_avx512.h"

#include "kernels/table.h"
#include "kernels/dot_products.h"

namespace octavo {
namespace {

constexpr Kernels with_dots(Kernels k) {
  k.matmul = matmul_dots;
  k.attention = attention<DotProducts>;
  k.attention_pieces = attention_pieces<DotProducts>;
  return k;
}

}  // namespace

constinit const Kernels kAvx512Bf16 = table("avx512_bf16");
constinit const Kernels kAvx512Bf16Dots = with_dots(table("avx512_bf16_dots"));
}  // namespace octavo
