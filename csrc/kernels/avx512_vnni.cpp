// AVX-512 with VNNI, the product of four bytes (see bytes_avx512.h).
#include "kernels/bytes_avx512.h"

#include "kernels/table.h"

namespace octavo {
constinit const Kernels kAvx512Vnni = table("avx512_vnni");
}
