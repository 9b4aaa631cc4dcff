// AVX-512 with matrix products, attention's too, on AMX tiles.
#include "kernels/bytes_avx512.h"

#include "kernels/table.h"
#if defined(OCTAVO_EMULATE_TILES)
#include "kernels/emulated_tiles.h"
#endif
#include "kernels/tiles.h"
#include "kernels/quant_tiles.h"
#include "kernels/tile_attention.h"

namespace octavo {
namespace {

constexpr Kernels with_tiles(Kernels k) {
  k.matmul = matmul_amx;
  k.quant_matmul = quant_matmul_amx;
  k.attention = attention<TileProducts>;
  k.attention_pieces = attention_pieces<TileProducts>;
  return k;
}

}  // namespace

constinit const Kernels kAmx = with_tiles(table("amx"));
}  // namespace octavo
