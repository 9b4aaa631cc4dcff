// What the runtime asks of a kernel table. One table an instruction set; all of them give the same bits.
//
// The bits contract, as these kernels keep it
// --------------------------------------------
// * Activations, weights, keys and values are bfloat16, but for the residual stream, which is float32; everything inside an
//   op is float32, and its result is rounded once (to nearest even) where it is written. No fast-math, no contraction; an
//   FMA is only used on a product of two bfloat16 numbers, which is exact in float32, so that FMA and mul + add agree.
// * Matrix products follow the rule of AMX's TDPBF16PS: for each chunk of 32 k's two sums start at zero, one takes the
//   products of the even k's in order, the other those of the odd k's; then acc += (even + odd), with acc from zero.
//   A short last chunk is as if padded with zeros.
// * Other reductions run over 16 lanes: element i goes to lane i % 16, lanes accumulate in order, and the lanes are then
//   added in a fixed tree: 8 + 8, 4 + 4, 2 + 2, 1 + 1 (lane i with lane i + 8, then i + 4, i + 2, i + 1).
// * A row's result never depends on which other rows there are, nor on how rows, columns or heads are cut into ranges.
// * exp (within 1 ulp) and tanh (2 ulps) are our own polynomials over mul and add (kernels/math.h; never libm); division and
//   square root are IEEE's. silu(x) = x / (1 + exp(-x)); gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))).
// * Subnormals are flushed (FTZ and DAZ are set by the pool's threads, as AMX does by itself; float_mode.h). In bfloat16, every
//   NaN is written as 0x7fc0 and every subnormal as zero of its sign.
//
// Weights in few bits
// -------------------
// A weight may stay at its file's own width: codes u of 4 to 8 bits, and for each column and group of 32 (or 16) k's a scale S
// and perhaps a minimum M, all exact: w = (u - offset) * S + M.
// * With int8 activations, a chunk of 32 k's of a row becomes whole numbers q and a scale s: a = max |x|; s = a / 127;
//   q = x * (127 / a), to nearest even. Where a is below 2^-100 both are zero; where it is not finite, s is NaN.
//     acc += (S * s) * float(sum of (u - offset) * q over the group)      an integer below 2^24, exact in any order
//     acc += M * (s * float(sum of q over the group))                     only where there are minima
//   over the groups in ascending order: multiply, multiply, add, each rounded, never an FMA; acc from zero.
// * With int16 activations the same, with 127 * 128 in place of 127. The integer is then below 2^27, and float() rounds it.
// * With bfloat16 activations the sums are by the matrix rule over the group: even and odd k's apart, from zero, in order, then
//   even + odd. (u - offset) * x is exact.
//     acc += S * (sum of (u - offset) * x);   acc += M * (sum of x)
//
// One limit: a product below 2^-126 is flushed by mul + add and not by an FMA, so that tables without FMA (portable) may differ
// from the others where a chunk's sum is below about 2^-100. Next to anything larger this vanishes in rounding. At the other
// end, products past 2^128 are infinite for mul + add, while an FMA may stay finite; and ARM64 tells a subnormal before
// rounding, x86 after it.
#pragma once

#include <cstdint>

// Functions that files compiled for different instruction sets share must leave no copy of their own for the linker to
// choose from: it might take the one that this machine cannot run.
#define OCTAVO_INLINE [[gnu::always_inline]] inline

namespace octavo {

using bf16 = std::uint16_t;

constexpr int kPanel = 16;   // columns of a weight panel; tokens of a KV panel
constexpr int kChunk = 32;   // k's that are summed from zero
constexpr int kPiece = 256;  // positions of an attention piece
constexpr int kMaxHeadDim = 256;  // of keys and values

// A weight [n, k] is packed into ceil(n / 16) panels of 16 columns; inside, pairs of k's stand side by side, so that one
// layout is a B tile of AMX and a pair of vectors of AVX-512. Rows past n and k's past k are zero.
//
//   panel p:   pair 0:  w[16p + 0][0] w[16p + 0][1]   w[16p + 1][0] w[16p + 1][1]  ...  w[16p + 15][0] w[16p + 15][1]
//              pair 1:  w[16p + 0][2] w[16p + 0][3]   ...
//              ...      round_up(k, 32) / 2 pairs of 64 bytes each
struct PackedWeight {
  const bf16* data = nullptr;  // 64-byte aligned
  int n = 0;
  int k = 0;
  OCTAVO_INLINE int panels() const { return (n + kPanel - 1) / kPanel; }
  OCTAVO_INLINE int padded_k() const { return (k + kChunk - 1) / kChunk * kChunk; }
  OCTAVO_INLINE const bf16* panel(int p) const { return data + static_cast<std::int64_t>(p) * padded_k() * kPanel; }
};

// How the codes of a chunk (32 k's of 16 columns) lie. A "quad" is 64 bytes: four k's of each column, so that one layout serves
// the byte products of AVX2, AVX-512, VNNI and AMX:
//
//   w[16p + 0][4q .. 4q + 3]   w[16p + 1][4q .. 4q + 3]  ...  w[16p + 15][4q .. 4q + 3]
enum class Codes : std::uint8_t {
  k4,      // 256 bytes: quad i in the low nibbles, quad i + 4 in the high ones, of 64 bytes i = 0 .. 3
  k5,      // and 64 bytes whose bits i are the fifth bits of quad i
  k6,      // and 2 x 64 bytes whose bits 2i, 2i + 1 are the upper bits of quad i (then of quad i + 4)
  k8,      // 512 bytes: the quads
  kTable,  // as k4, and each nibble names one of sixteen codes (kNonLinear)
};
// The sixteen values of IQ4_NL and IQ4_XS, plus 128.
constexpr std::uint8_t kNonLinear[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

// What scales and minima are stored as, and how many bytes one takes.
enum class Scales : std::uint8_t {
  kHalf,   // half floats, as in files whose blocks are of 32
  kFloat,
  kWhole,  // signed bytes, times a half float for each column and super-block of 256 k's: a product that is exact in float32
};
constexpr int kSuperChunks = 8;

struct QuantFormat {
  Codes codes = Codes::k8;
  int group = kChunk;        // k's that share a scale: 32 or 16
  int offset = 128;          // of the codes
  bool has_minimum = false;
  Scales scales = Scales::kHalf;
  OCTAVO_INLINE int code_bytes() const {  // of a chunk, as all of these
    constexpr int kBytes[] = {256, 320, 384, 512, 256};
    return kBytes[static_cast<int>(codes)];
  }
  OCTAVO_INLINE int groups() const { return kChunk / group; }
  OCTAVO_INLINE int scale_bytes() const {  // minima apart
    constexpr int kBytes[] = {2, 4, 1};
    return groups() * kPanel * kBytes[static_cast<int>(scales)];
  }
  OCTAVO_INLINE int chunk_bytes() const { return code_bytes() + scale_bytes() * (has_minimum ? 2 : 1); }
  OCTAVO_INLINE int factor_bytes() const { return scales == Scales::kWhole ? kPanel * (has_minimum ? 4 : 2) : 0; }  // of a super-block
  // From a panel's begin to where chunk `i`, the first of a super-block, has its factors.
  OCTAVO_INLINE std::int64_t super_offset(int i) const { return std::int64_t{i} * chunk_bytes() + i / kSuperChunks * factor_bytes(); }
  bool operator==(const QuantFormat&) const = default;
};

// A weight [n, k] at its own width, a panel of 16 columns after the other. A panel is one stream (codes here and scales there
// were measured to be read at a third of the speed: the processor does not fetch ahead in both):
//
//   panel p:   chunk 0: codes | scales of 16 columns (groups of 16: of the first, then of the second) | minima likewise, if any
//              chunk 1: ...
//
// With Scales::kWhole a super-block's factors stand before its first chunk: of the scales of 16 columns | of the minima.
// Panels begin at multiples of 64 bytes. Columns past n have scale and minimum zero.
struct QuantWeight {
  const std::uint8_t* data = nullptr;  // 64-byte aligned
  int n = 0, k = 0;
  QuantFormat format;
  OCTAVO_INLINE int panels() const { return (n + kPanel - 1) / kPanel; }
  OCTAVO_INLINE int chunks() const { return (k + kChunk - 1) / kChunk; }
  OCTAVO_INLINE std::int64_t panel_bytes() const {
    const int supers = (chunks() + kSuperChunks - 1) / kSuperChunks;
    return (std::int64_t{chunks()} * format.chunk_bytes() + supers * format.factor_bytes() + 63) / 64 * 64;
  }
  OCTAVO_INLINE std::int64_t bytes() const { return panels() * panel_bytes(); }
  OCTAVO_INLINE const std::uint8_t* panel(int p) const { return data + p * panel_bytes(); }
};

// Activations: [rows, stride] bfloat16, 64-byte aligned, stride a multiple of 32; columns from width to stride are zero and
// stay so (kernels write exactly `width` columns, and may read up to the stride).
struct Rows {
  bf16* data = nullptr;
  std::int64_t stride = 0;  // elements
  OCTAVO_INLINE bf16* row(std::int64_t i) const { return data + i * stride; }
};

// What activations are in a product with a weight in few bits.
enum class Activations { kInt8, kInt16, kBfloat16 };

// A chunk of a row, for such a product; with int16 two of them, side by side: q = 128 * (first's codes) + (second's codes).
struct alignas(64) QuantChunk {
  std::int8_t codes[kChunk];  // q; not used with bfloat16 activations
  float scale;                // s
  std::int32_t initial[2];    // -offset * (sum of codes) of each group: where its integer sum starts
  float sums[2];              // of each group: s * float(sum of q); of x itself with bfloat16 activations
};
OCTAVO_INLINE constexpr int chunks_each(Activations a) { return a == Activations::kInt16 ? 2 : 1; }
struct QuantRows {
  QuantChunk* data = nullptr;
  std::int64_t stride = 0;    // chunks
  OCTAVO_INLINE QuantChunk* row(std::int64_t i) const { return data + i * stride; }
};

// Rows of the residual stream: likewise in float32.
struct FloatRows {
  float* data = nullptr;
  std::int64_t stride = 0;  // elements
  OCTAVO_INLINE float* row(std::int64_t i) const { return data + i * stride; }
};

enum class Epilogue {
  kStore,      // out = bf16(acc + bias)
  kAdd,        // out_float = residual + float(bf16(acc + bias))
  kSiluMul,    // panels 2j and 2j + 1 hold gate and up of columns 16j ..: g = bf16(acc_g + bias_g), u = bf16(acc_u + bias_u),
               // out = bf16(silu(g) * u); `out` has half as many columns
  kGeluMul,    // likewise with gelu (tanh form)
  kFloat,      // out_float = acc + bias
};

struct Matmul {
  Rows x;                          // [rows, w.k]
  PackedWeight w;
  const float* bias = nullptr;     // [round_up(n, 16)] in the panels' order, or null: nothing is added
  Epilogue epilogue = Epilogue::kStore;
  Rows out;
  FloatRows residual;              // kAdd; may be the same memory as out_float
  FloatRows out_float;             // kAdd, kFloat
  int out_width = 0;               // columns to write
};

// Rows as a product with a weight of this format needs them.
struct Quantize {
  Rows x;
  QuantRows out;
  int k = 0;
  QuantFormat format;
  Activations activations = Activations::kInt8;
};

struct QuantMatmul {
  Matmul m;                        // all but m.w, which is not read
  QuantWeight w;
  QuantRows x;                     // of m.x, by Quantize with the same format and activations
  Activations activations = Activations::kInt8;
};

struct RmsNorm {
  Rows x, out;                     // may be the same memory
  FloatRows x_float;               // when it has data, this is x: rows of the residual stream
  const float* weight = nullptr;   // [width]
  int groups = 1;                  // groups * width columns; each group (a head, for q and k norms) by itself
  int width = 0;
  float eps = 0;                   // y = bf16((x * (1 / sqrt(sum(x^2) / width + eps))) * weight)
};

// Half-split rotary embedding: of each head, columns i and i + half turn by the row's angle i; the rest is copied.
struct Rope {
  Rows x, out;                     // may be the same memory
  const float* cos = nullptr;      // [rows, half], attention factor included
  const float* sin = nullptr;
  int heads = 0, head_dim = 0, half = 0;  // a' = bf16(a * cos - b * sin), b' = bf16(b * cos + a * sin): mul, mul, sub/add
};

enum class Gate { kSilu, kGelu };

struct GateMul {
  Rows gate, up, out;              // out = bf16(f(gate) * up)
  int width = 0;
  Gate f = Gate::kSilu;
};

struct Add {
  FloatRows a;                     // the residual stream
  Rows b;
  FloatRows out;                   // out = a + b; may be the same memory as a
  int width = 0;
};

enum class KvType : std::uint8_t { kBfloat16, kInt8 };

// KV cache of one layer. A block holds block_size tokens (a multiple of 16) as panels of 16; per KV head
//   keys    [panel][head_dim / 2][16 tokens][2]     pairs of dimensions side by side: a packed weight of 16 columns
//   values  [panel][8 token pairs][head_dim][2]     pairs of tokens side by side
// and a layer's part of a block is [kv_heads][panels of the block][...], once for keys and once for values. What other layers
// keep may lie between one block's part and the next one's. head_dim is a multiple of 16 and at most 256. Slots that were never
// written may hold anything, NaN too.
//
// In int8 a byte is a code plus 128, in quads as those of weights (above QuantFormat), and a panel ends with the scales of its tokens;
// again one stream:
//   keys    [head_dim / 4][16 tokens][4]        then 16 floats
//   values  [4 token quads][head_dim][4]        then 16 floats
// A token's head x is turned and becomes codes and a scale: a = max |x|; s = a / 127; codes x * (127 / a), to nearest even. Where a
// is below 2^-100 all are zero; where it is not finite, s is NaN and the codes are zero.
//
// It is turned by a Hadamard matrix, which spreads a few large numbers, as keys have them, over all (as QuaRot does: Ashkboos and
// others, 2024). Queries are turned to meet the keys, and results are turned back. Each n numbers by themselves, where n =
// turn_width(head_dim); for half = 1, 2, 4 .. n / 2, numbers i and i + half of each 2 * half become their sum and their difference,
// in float32. To turn twice is to multiply by n.
OCTAVO_INLINE constexpr int turn_width(int head_dim) { return head_dim & -head_dim; }
struct KvCache {
  std::uint8_t* keys = nullptr;    // of block 0; 64-byte aligned
  std::uint8_t* values = nullptr;
  int kv_heads = 0, head_dim = 0, block_size = 0;
  std::int64_t block_stride = 0;   // bytes from a block to the next
  KvType type = KvType::kBfloat16;
  OCTAVO_INLINE static constexpr std::int64_t panel_bytes(KvType type, int head_dim) {
    return std::int64_t{kPanel} * (type == KvType::kInt8 ? head_dim + 4 : 2 * head_dim);
  }
  OCTAVO_INLINE std::int64_t offset(std::int64_t block, int head, int panel) const {
    return block * block_stride + (std::int64_t{head} * (block_size / kPanel) + panel) * panel_bytes(type, head_dim);
  }
};

// Query rows first .. first + count - 1 of T belong to one sequence and stand at positions position .. position + count - 1.
// Each sees positions max(0, p - window + 1) .. p (window 0: from 0), read through the block table as stored.
// Per query row and head, over pieces of 256 absolute positions, left to right:
//   s_t   = (q . k_t by the matrix rule over head_dim) * scale; with a softcap: tanh(s_t / cap) * cap
//   m     = max of s_t over the piece's visible t;   w_t = bf16(exp(s_t - m));
//   l     = sum of w_t (16 lanes by t % 16, panels in order, fixed tree at the end of the piece)
//   o_d   = sum of w_t * v_t[d] by the matrix rule with chunks of 16 tokens (a panel): even t's and odd t's apart
// and pieces merge: with M = max(m_old, m): a = exp(m_old - M), b = exp(m - M), L = L * a + l * b, O = O * a + o * b (the first
// piece is taken as it is); result bf16(O / L). Masked t's are skipped, never multiplied.
// With keys and values in int8, k_t and v_t are their codes, and what multiplies them becomes whole numbers as well: of n numbers x,
// W(x) = x * (16256 / a) to nearest even, and their scale is a / 16256, where a = max |x| and 16256 = 127 * 128; zeros and NaN as
// above KvCache. Sums of products are exact, in any order, and below 2^31; float() rounds them once.
//   s_t   = float(W(turned q) . k_t) * key scale * (q's scale * (scale / turn_width(head_dim))), in this order; softcap as above
//   w_t   = exp(s_t - m) * value scale;   l = sum of exp(s_t - m), as above
//   o_d   = float(sum of W(w)_t * v_t[d]) * w's scale, over the visible tokens of the piece
//   result bf16((turned O / turn_width(head_dim)) / L)
struct Attention {
  Rows q, out;                     // [T, heads * head_dim]
  KvCache cache;
  const std::int32_t* block_table = nullptr;  // of this sequence
  int heads = 0;
  int first = 0, count = 0;        // rows of T
  int position = 0;                // of the first row
  int window = 0;
  float scale = 1, softcap = 0;    // softcap 0: none
};

// Attention may also be computed a few pieces at a time: attention_pieces leaves what each row got of each piece, and
// attention_merge joins them. Threads then share a long context, and sequences share what they have in common: rows of one call
// may belong to several sequences, as long as their block tables agree over its pieces.
//
// What a row got of piece i for head h of the group of a KV head:
//
//   partials + kv_head * head_stride + (i * group + h) * partial_floats(head_dim):   o [head_dim]   m   l (0: saw none of it)   unused
//
// Pieces count from position 0; those before a window are neither written nor read.
struct AttentionRow {
  int row, position;               // row of q and of out
  float* partials = nullptr;
  std::int64_t head_stride = 0;    // floats
};
OCTAVO_INLINE constexpr std::int64_t partial_floats(int head_dim) { return head_dim + kPanel; }

struct Kernels {
  const char* name;                // "portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"; "avx512_bf16_dots"
  // Rows [row_begin, row_end) and panels [panel_begin, panel_end) of w; for kSiluMul / kGeluMul both bounds are even.
  void (*matmul)(const Matmul&, std::int64_t row_begin, std::int64_t row_end, int panel_begin, int panel_end);
  // The same with a weight in few bits, and what comes before it.
  void (*quantize)(const Quantize&, std::int64_t row_begin, std::int64_t row_end);
  void (*quant_matmul)(const QuantMatmul&, std::int64_t row_begin, std::int64_t row_end, int panel_begin, int panel_end);
  void (*rms_norm)(const RmsNorm&, std::int64_t row_begin, std::int64_t row_end);
  void (*rope)(const Rope&, std::int64_t row_begin, std::int64_t row_end);
  void (*gate_mul)(const GateMul&, std::int64_t row_begin, std::int64_t row_end);
  void (*add)(const Add&, std::int64_t row_begin, std::int64_t row_end);
  // Rows [row_begin, row_end) within [0, count) and the query heads of KV heads [head_begin, head_end).
  void (*attention)(const Attention&, int row_begin, int row_end, int head_begin, int head_end);
  // The same in two parts, for one KV head: pieces [piece_begin, piece_end), then all of them joined. `first`, `count` and
  // `position` of Attention are not used.
  void (*attention_pieces)(const Attention&, const AttentionRow* rows, int count, int head, int piece_begin, int piece_end);
  void (*attention_merge)(const Attention&, const AttentionRow* rows, int count, int head);
  // Codes of a token's key or value of one head for a cache in int8, and their scale.
  float (*quantize_head)(const bf16* x, int head_dim, std::int8_t* codes);
  // x = tanh(x / cap) * cap over count floats (logit soft-cap).
  void (*softcap)(float* x, std::int64_t count, float cap);
  // float32 -> bfloat16, nearest even, NaN stays a (quiet) NaN; count elements.
  void (*to_bf16)(const float* x, bf16* y, std::int64_t count);
};

extern const Kernels kPortable;
#if defined(__x86_64__)
extern const Kernels kAvx2, kAvx512, kAvx512Vnni, kAvx512Bf16, kAmx;
// Not of the contract: its products round in another order than the matrix rule, and run at twice the speed (--fast-math).
extern const Kernels kAvx512Bf16Dots;
#endif

// Tables that this CPU and operating system can run, slowest first; the first is always portable. Asks the kernel for the
// AMX tile state (arch_prctl) before it names amx.
int available(const Kernels** out, int capacity);
// By name; null when there is none of that name here.
const Kernels* find(const char* name);
// The table that is faster than this one where results may differ from the other tables' in their last bits; or this one, where
// there is none.
const Kernels& fast_math(const Kernels& table);

}  // namespace octavo
