// The kernels of one instruction set: a file of its own includes its vec_*.h and bytes_*.h, then this, and defines its table.
#pragma once

#include "kernels.h"
// Order matters: each builds on the ones above.
#include "kernels/lanes.h"
#include "kernels/math.h"
#include "kernels/products.h"
#include "kernels/matmul.h"
#include "kernels/quant_rows.h"
#include "kernels/quant_matmul.h"
#include "kernels/norm.h"
#include "kernels/rope.h"
#include "kernels/gate.h"
#include "kernels/attention_tile.h"
#include "kernels/code_attention.h"
#include "kernels/attention.h"

namespace octavo {
namespace {

constexpr Kernels table(const char* name) {
  return {name,      matmul,           quantize,        quant_matmul,
          rms_norm,  rope,             gate_mul,        add,
          attention<FmaProducts>, attention_pieces<FmaProducts>, attention_merge, quantize_head, softcap, to_bf16};
}

}  // namespace
}  // namespace octavo
