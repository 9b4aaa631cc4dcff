// AVX-512 F, BW, VL and DQ.
#include "kernels/bytes_avx512.h"

#include "kernels/table.h"

namespace octavo {
constinit const Kernels kAvx512 = table("avx512");
}
