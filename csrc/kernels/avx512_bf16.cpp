// AVX-512 with the conversion to bfloat16 (see vec_avx512.h).
#include "kernels/vec_avx512.h"

#include "kernels/table.h"

namespace octavo {
constinit const Kernels kAvx512Bf16 = table("avx512_bf16");
}
