// AVX2 and FMA.
#include "kernels/bytes_avx2.h"

#include "kernels/table.h"

namespace octavo {
constinit const Kernels kAvx2 = table("avx2");
}
