"""NumPy twin of `quantization.py`: the same names and, bit for bit, the same results, for the host and for tests.

Element formats and activation quantizers of the model specification, "Quantization arithmetic", and of the kernel
chapter, "Element formats" and "Quantizers". Independent code: tables and `ldexp` here, bit arithmetic there.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.uint8]
Floats = NDArray[np.float32]

BLOCK = 32
"""Elements per E8M0 scale along the last axis, and the edge of a dense weight block."""
BLOCK_Q4N = 16
"""Elements per E4M3 scale of `quantize_q4n`."""

E4M3_MAX = 448.0
RECIPROCAL_448 = np.uint32(0x3B124925).view(np.float32)
RECIPROCAL_6 = np.uint32(0x3E2AAAAB).view(np.float32)

_E2M1_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1_VALUES: Floats = np.concatenate([_E2M1_MAGNITUDES, -_E2M1_MAGNITUDES])
_E4M3_VALUES: Floats = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_E8M0_VALUES: Floats = np.concatenate([np.ldexp(np.float32(1), np.arange(-127, 128)), [np.nan]]).astype(np.float32)


def decode_e2m1(codes: Codes) -> Floats:
    """E2M1 codes 0..15 (uint8, any shape) to float32; code 8 is -0."""
    return _E2M1_VALUES[codes]


def encode_e2m1(x: NDArray[np.floating]) -> Codes:
    """Nearest E2M1 code (uint8 0..15) of `x`, ties to the even code, saturating at 6, sign bit kept.

    NaN has no code and becomes a zero.
    """
    x = np.asarray(x, np.float32)
    return _e2m1_code(np.abs(x), x, np.float32(1))


_E2M1_STEPS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


def _e2m1_code(magnitude: Floats, sign_source: Floats, step: Any) -> Codes:
    code = np.zeros(magnitude.shape, np.uint8)
    for threshold, inclusive in _E2M1_STEPS:
        bound = np.float32(threshold) * step
        code += (magnitude >= bound) if inclusive else (magnitude > bound)
    code |= np.signbit(sign_source).astype(np.uint8) << np.uint8(3)
    return code


def pack_nibbles(codes: Codes) -> Codes:
    """Codes 0..15 [..., 2n] to bytes [..., n]; the even element is the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))


def unpack_nibbles(packed: Codes) -> Codes:
    """Bytes [..., n] to codes 0..15 [..., 2n]; the low nibble is the even element."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def decode_e4m3(codes: Codes | NDArray[ml_dtypes.float8_e4m3fn]) -> Floats:
    """E4M3 (float8_e4m3fn values or their uint8 codes) to float32; 0x7F and 0xFF are NaN."""
    return _E4M3_VALUES[np.asarray(codes).view(np.uint8)]


def encode_e4m3(x: NDArray[np.floating]) -> Codes:
    """Nearest E4M3 code (uint8) of `x`, ties to even, saturating at 448; any NaN becomes 0x7F."""
    clipped = np.clip(np.asarray(x, np.float32), -E4M3_MAX, E4M3_MAX)
    with np.errstate(invalid="ignore"):
        codes = clipped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(clipped), np.uint8(0x7F), codes)


def decode_e8m0(codes: Codes) -> Floats:
    """E8M0 codes (uint8) to float32 `2^(code - 127)`; 0 gives the subnormal 2^-127, 255 gives NaN."""
    return _E8M0_VALUES[codes]


def power_of_two_ceiling_code(t: NDArray[np.floating]) -> Codes:
    """E8M0 code of the smallest power of two >= `t`, for normal positive float32 `t`, from its bits.

    At most 254, so that a scale made here is finite; a NaN gives 255, the NaN scale.
    Source: model specification, "Power-of-two ceiling".
    """
    bits = np.asarray(t, np.float32).view(np.uint32)
    code = np.minimum((bits >> 23 & 255) + (bits & 0x7FFFFF != 0), 254)
    return np.where(np.isnan(t), 255, code).astype(np.uint8)


def _blocks(x: NDArray[np.floating], size: int) -> Floats:
    if x.shape[-1] % size:
        raise ValueError(f"the last axis has {x.shape[-1]} elements, not a multiple of the block of {size}")
    return np.asarray(x, np.float32).reshape(*x.shape[:-1], x.shape[-1] // size, size)


def _block_maximum(blocks: Floats, floor: float) -> Floats:
    largest: Floats = np.max(np.abs(blocks), axis=-1)
    return np.maximum(largest, np.float32(floor))


def _divide_by_power_of_two(x: Floats, codes: Codes) -> Floats:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.where(codes == 255, np.float32(np.nan), np.ldexp(x, 127 - codes.astype(np.int32)))


def quantize_q8(x: NDArray[np.floating]) -> tuple[Codes, Codes]:
    """Q8: `x` [..., K] to E4M3 codes uint8 [..., K] and E8M0 scale codes uint8 [..., K / 32].

    Source: model specification, "The three activation formats". A NaN in a block makes its scale NaN.
    """
    blocks = _blocks(x, BLOCK)
    with np.errstate(over="ignore"):
        scales = power_of_two_ceiling_code(_block_maximum(blocks, 1e-4) * RECIPROCAL_448)
    return encode_e4m3(_divide_by_power_of_two(blocks, scales[..., None])).reshape(x.shape), scales


def quantize_q4m(x: NDArray[np.floating]) -> tuple[Codes, Codes]:
    """Q4m (MXFP4 style): `x` [..., K] to E2M1 codes uint8 [..., K] and E8M0 scale codes uint8 [..., K / 32].

    Source: model specification, "The three activation formats". A NaN in a block makes its scale NaN.
    """
    blocks = _blocks(x, BLOCK)
    scales = power_of_two_ceiling_code(_block_maximum(blocks, 6 * 2.0**-126) * RECIPROCAL_6)
    return encode_e2m1(_divide_by_power_of_two(blocks, scales[..., None])).reshape(x.shape), scales


def quantize_q4n(x: NDArray[np.floating]) -> tuple[Codes, Codes]:
    """Q4n (NVFP4 style): `x` [..., K] to E2M1 codes uint8 [..., K] and E4M3 scales uint8 [..., K / 16].

    There is no tensor scale, and the scale is rounded to nearest, so that values may saturate at 6. `x / s` is never
    formed: magnitudes are compared with threshold times scale, which is exact (kernel chapter, "Quantizers", rule 3).
    A NaN in a block makes its scale NaN.
    """
    blocks = _blocks(x, BLOCK_Q4N)
    scales = encode_e4m3(np.minimum(_block_maximum(blocks, 6 * 2.0**-9) * RECIPROCAL_6, E4M3_MAX))
    codes = _e2m1_code(np.abs(blocks), blocks, decode_e4m3(scales)[..., None])
    return codes.reshape(x.shape), scales


def _scaled(values: Floats, scales: Floats, size: int) -> Floats:
    """Each run of `size` values of the last axis times its scale; past the float32 range is infinity, as in jnp."""
    with np.errstate(over="ignore"):
        return values * np.repeat(scales, size, axis=-1)


def fake_q8(x: NDArray[np.floating]) -> NDArray[np.floating]:
    """`x` [..., K] rounded to the Q8 grid, in the dtype of `x`."""
    codes, scales = quantize_q8(x)
    return _scaled(decode_e4m3(codes), decode_e8m0(scales), BLOCK).astype(x.dtype)


def fake_q4m(x: NDArray[np.floating]) -> NDArray[np.floating]:
    """`x` [..., K] rounded to the Q4m grid, in the dtype of `x`."""
    codes, scales = quantize_q4m(x)
    return _scaled(decode_e2m1(codes), decode_e8m0(scales), BLOCK).astype(x.dtype)


def fake_q4n(x: NDArray[np.floating]) -> NDArray[np.floating]:
    """`x` [..., K] rounded to the Q4n grid, in the dtype of `x`."""
    codes, scales = quantize_q4n(x)
    return _scaled(decode_e2m1(codes), decode_e4m3(scales), BLOCK_Q4N).astype(x.dtype)


def quantize_index_key_fp8(x: NDArray[np.floating]) -> tuple[Codes, Floats]:
    """Index key rows `x` [..., I] to E4M3 codes uint8 [..., I] and a power-of-two scale float32 [...] per row.

    Source: kernel chapter, "Quantizers", `Q_IDX8`.
    """
    x = np.asarray(x, np.float32)
    with np.errstate(over="ignore"):
        scales = power_of_two_ceiling_code(_block_maximum(x, 1e-4) * RECIPROCAL_448)
    return encode_e4m3(_divide_by_power_of_two(x, scales[..., None])), decode_e8m0(scales)


def quantize_index_query_fp8(q: NDArray[np.floating]) -> tuple[Codes, Floats]:
    """Index queries `q` [..., I] to E4M3 codes uint8 [..., I] and an ordinary scale float32 [...] per (token, head).

    Source: kernel chapter, "Quantizers", `Q_QRY8`.
    """
    q = np.asarray(q, np.float32)
    scale = _block_maximum(q, 1e-10) * RECIPROCAL_448
    with np.errstate(invalid="ignore"):
        return encode_e4m3(q / scale[..., None]), scale


def dequantize_dense(codes: Codes | NDArray[ml_dtypes.float8_e4m3fn], scales: Codes) -> Floats:
    """Dense weight: E4M3 [..., O, K] with E8M0 [..., ceil(O / 32), ceil(K / 32)] to float32 [..., O, K]."""
    rows, columns = codes.shape[-2:]
    grid = np.repeat(np.repeat(decode_e8m0(scales), BLOCK, axis=-2), BLOCK, axis=-1)
    return _scaled(decode_e4m3(codes), grid[..., :rows, :columns], 1)


def dequantize_expert(packed: Codes, scales: Codes) -> Floats:
    """Routed expert weight: packed E2M1 bytes [..., O, K / 2] with E8M0 [..., O, K / 32] to float32 [..., O, K]."""
    return _scaled(decode_e2m1(unpack_nibbles(packed)), decode_e8m0(scales), BLOCK)


def dequantize_rows(codes: Codes | NDArray[ml_dtypes.float8_e4m3fn], scales: Codes) -> Floats:
    """Engram rows: E4M3 [..., n] with E8M0 [..., n / 32] to float32 [..., n]."""
    return _scaled(decode_e4m3(codes), decode_e8m0(scales), BLOCK)
