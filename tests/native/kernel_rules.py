"""The rules of csrc/kernels.h, written out in numpy float32: slow, literal, and sharing nothing with the kernels.

Every elementwise operation of numpy on float32 is one IEEE operation, so that these give the very bits that a kernel
must give. bfloat16 arrays are uint16, as in the bindings. Keep data clear of subnormals, which numpy does not flush.
"""

import numpy as np
from numpy.typing import NDArray

F32 = np.float32
Floats = NDArray[np.float32]
Bits = NDArray[np.uint16]
PIECE = 256


def to_bf16(x: NDArray[np.floating]) -> Bits:
    """Nearest bfloat16, ties to even; NaN becomes 0x7fc0, a subnormal zero of its sign."""
    u = np.ascontiguousarray(x, dtype=F32).view(np.uint32)
    magnitude = u & 0x7FFFFFFF
    rounded = ((u.astype(np.uint64) + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
    rounded = np.where(magnitude < 0x00800000, (u >> 16).astype(np.uint16) & 0x8000, rounded)
    return np.where(magnitude > 0x7F800000, 0x7FC0, rounded).astype(np.uint16)


def from_bf16(bits: Bits) -> Floats:
    return (bits.astype(np.uint32) << 16).view(F32)


def rounded(x: NDArray[np.floating]) -> Floats:
    return from_bf16(to_bf16(x))


def matrix_rule(x: Floats, w: Floats, chunk: int = 32) -> Floats:
    """x [rows, k] times w [columns, k] transposed: even and odd k's of each chunk from zero, then acc += even + odd."""
    acc = np.zeros((len(x), len(w)), F32)
    for start in range(0, x.shape[1], chunk):
        even, odd = np.zeros_like(acc), np.zeros_like(acc)
        for k in range(start, min(start + chunk, x.shape[1])):
            product = x[:, k, None] * w[None, :, k]
            if k % 2 == 0:
                even = even + product
            else:
                odd = odd + product
        acc = acc + (even + odd)
    return acc


def lane_sum(x: Floats) -> Floats:
    """Sum over the last axis: 16 lanes in order, then the tree 8 + 8, 4 + 4, 2 + 2, 1 + 1."""
    lanes = np.zeros((*x.shape[:-1], 16), F32)
    for i in range(x.shape[-1]):
        lanes[..., i % 16] += x[..., i]
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def exp(x: Floats) -> Floats:
    with np.errstate(over="ignore", invalid="ignore"):
        lowest = F32(-87.33)
        clamped = np.minimum(F32(89), np.maximum(lowest, x))
        n = np.rint(clamped * F32(1.44269504)).astype(F32)
        r = (clamped - n * F32(0.693359375)) - n * F32(-2.12194440e-4)
        p = F32(1.38131424e-3)
        for c in (8.36941879e-3, 4.16684560e-2, 1.66665152e-1, 4.99999940e-1):
            p = p * r + F32(c)
        y = np.ldexp(((r * r) * p + r) + F32(1), np.nan_to_num(n).astype(np.int32)).astype(F32)
        return np.where(x < lowest, F32(0), y)


def tanh(x: Floats) -> Floats:
    with np.errstate(over="ignore", invalid="ignore"):
        a = np.abs(x)
        z = x * x
        p = F32(-5.70497848e-3)
        for c in (2.06390787e-2, -5.37397098e-2, 1.33314422e-1, -3.33332807e-1):
            p = p * z + F32(c)
        small = (p * z) * a + a
        large = F32(1) - F32(2) / (exp(a + a) + F32(1))
        return np.copysign(np.where(a < F32(0.625), small, large), x)


def silu(x: Floats) -> Floats:
    return x / (F32(1) + exp(F32(0) - x))


def gelu(x: Floats) -> Floats:
    inner = F32(0.797884561) * (x + F32(0.044715) * ((x * x) * x))
    return (F32(0.5) * x) * (F32(1) + tanh(inner))


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """x [..., width]: normalised over the last axis, not yet rounded."""
    mean = lane_sum(x * x) / F32(x.shape[-1])
    return (x * (F32(1) / np.sqrt(mean + F32(eps)))[..., None]) * weight


def turn_width(dim: int) -> int:
    return next(n for n in (256, 128, 64, 32, 16) if dim % n == 0)


def turn(x: Floats) -> Floats:
    """x [..., head_dim] through Hadamard matrices, what stands side by side first."""
    n = turn_width(x.shape[-1])
    x, half = x.reshape(-1, n), 1
    while half < n:
        pairs = x.reshape(len(x), -1, 2, half)
        x = np.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), axis=2).reshape(len(x), n)
        half *= 2
    return x


def quantize_heads(x: Floats) -> tuple[Floats, Floats]:
    """x [..., head_dim] as it is stored in int8: codes of what it turns into, as floats, and scales [...]."""
    return to_codes(turn(x).reshape(x.shape), 127)


def to_codes(x: Floats, most: int) -> tuple[Floats, Floats]:
    """x [..., n] as whole numbers up to `most` in size, and their scales [...]."""
    largest = np.abs(x).max(-1)
    small = largest < F32(2.0**-100)
    inverse = np.where(small, F32(0), F32(most) / np.where(small, F32(1), largest))
    return np.rint(x * inverse[..., None]), np.where(small, F32(0), largest / F32(most))


TWO_BYTES = 127 * 128


def products_of_codes(x: Floats, w: Floats) -> Floats:
    """[n] and [rows, n] of whole numbers: exact sums [rows], rounded once."""
    return (w.astype(np.int64) @ x.astype(np.int64)).astype(F32)


def attend(
    q: Floats,
    keys: Floats,
    values: Floats,
    first: int,
    last: int,
    scale: float,
    softcap: float,
    scales: tuple[Floats, Floats] | None = None,
) -> Floats:
    """One query [head_dim] over positions first .. last of keys and values [positions, head_dim], not yet rounded.

    Args:
        scales: of keys and values [positions] in int8, which are then codes.
    """
    dim = len(q)
    if scales:
        q, q_scale = to_codes(turn(q).reshape(-1), TWO_BYTES)
        scale = float(q_scale * (F32(scale) / F32(turn_width(dim))))
    top, total, result = F32(0), F32(0), np.zeros(dim, F32)
    for start in range(first // PIECE * PIECE, last + 1, PIECE):
        t = np.arange(max(first, start), min(last + 1, start + PIECE))
        scores = products_of_codes(q, keys[t]) * scales[0][t] if scales else matrix_rule(q[None], keys[t])[0]
        scores = scores * F32(scale)
        if softcap:
            scores = tanh(scores / F32(softcap)) * F32(softcap)
        largest = scores.max()
        weights = np.zeros(PIECE, F32)
        weights[t - start] = exp(scores - largest)
        if scales:
            codes, by = to_codes(weights[t - start] * scales[1][t], TWO_BYTES)
            mixed = products_of_codes(codes, values[t].T) * by
        else:
            weights = rounded(weights)
            seen = np.zeros((PIECE, dim), F32)
            seen[t - start] = values[t]
            mixed = matrix_rule(weights[None], np.ascontiguousarray(seen.T), chunk=16)[0]
        sums = lane_sum(weights)
        if start <= first:
            top, total, result = largest, sums, mixed
            continue
        both = max(top, largest)
        a, b = exp(np.array([top - both, largest - both], F32))
        total = total * a + sums * b
        result = result * a + mixed * b
        top = both
    if scales:
        result = turn(result).reshape(-1) / F32(turn_width(dim))
    return result / total
