"""E2M1, E4M3 and E8M0 codecs and the activation quantizers, in jnp, exact to the bit under `jit`.

Element formats and quantizers of the model specification, "Quantization arithmetic", and of the kernel chapter,
"Element formats" and "Quantizers". `quantization_numpy.py` is the host twin.

Three habits of compilers decide how this is written. XLA deletes a cast to a narrower float that is followed by a cast
back (seen on GPUs: a fake quantizer made of casts did nothing), so that codes are computed from bits and never by a
cast. Compiled CPU and TPU code treats float32 subnormals as zero; wherever one can matter (subnormal inputs of Q4m,
scale code 0) the value goes through its bits too. A float maximum over a large array may lose a NaN (seen on CPUs), so
that maxima are taken over bits.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

BLOCK = 32
"""Elements per E8M0 scale along the last axis, and the edge of a dense weight block."""
BLOCK_Q4N = 16
"""Elements per E4M3 scale of `quantize_q4n`."""

E4M3_MAX = 448.0
RECIPROCAL_448 = np.uint32(0x3B124925).view(np.float32)
RECIPROCAL_6 = np.uint32(0x3E2AAAAB).view(np.float32)

_E2M1_STEPS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
"""Magnitudes at which the code steps up, and whether the tie itself steps: ties go to the even code."""


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _from_bits(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits.astype(jnp.int32), jnp.float32)


def decode_e2m1(codes: Array) -> Array:
    """E2M1 codes 0..15 (uint8, any shape) to float32; code 8 is -0."""
    code = codes.astype(jnp.int32)
    exponent = (code >> 1) & 3
    mantissa = code & 1
    normal = ((exponent + 126) << 23) | (mantissa << 22)
    half_or_zero = mantissa * 0x3F000000
    return _from_bits(jnp.where(exponent > 0, normal, half_or_zero) | ((code & 8) << 28))


def _e2m1_code(magnitude: Array, sign_source: Array, step: Array | float) -> Array:
    code = jnp.zeros(magnitude.shape, jnp.int32)
    for threshold, inclusive in _E2M1_STEPS:
        bound = threshold * step
        code += ((magnitude >= bound) if inclusive else (magnitude > bound)).astype(jnp.int32)
    return (code | (jnp.signbit(sign_source).astype(jnp.int32) << 3)).astype(jnp.uint8)


def encode_e2m1(x: Array) -> Array:
    """Nearest E2M1 code (uint8 0..15) of `x`, ties to the even code, saturating at 6, sign bit kept.

    NaN has no code and becomes a zero.
    """
    x = x.astype(jnp.float32)
    return _e2m1_code(jnp.abs(x), x, 1.0)


def pack_nibbles(codes: Array) -> Array:
    """Codes 0..15 [..., 2n] to bytes [..., n]; the even element is the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Array) -> Array:
    """Bytes [..., n] to codes 0..15 [..., 2n]; the low nibble is the even element."""
    return jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def decode_e4m3(codes: Array) -> Array:
    """E4M3 (float8_e4m3fn values or their uint8 codes) to float32; 0x7F and 0xFF are NaN."""
    if codes.dtype != jnp.uint8:
        codes = lax.bitcast_convert_type(codes, jnp.uint8)
    code = codes.astype(jnp.int32)
    magnitude = code & 0x7F
    subnormal = magnitude.astype(jnp.float32) * 2.0**-9
    bits = jnp.where(magnitude < 8, _bits(subnormal), (magnitude << 20) + (120 << 23))
    bits = jnp.where(magnitude == 0x7F, 0x7FC00000, bits)
    return _from_bits(bits | ((code & 0x80) << 24))


def encode_e4m3(x: Array) -> Array:
    """Nearest E4M3 code (uint8) of `x`, ties to even, saturating at 448; any NaN becomes 0x7F."""
    bits = _bits(x.astype(jnp.float32))
    absolute = bits & 0x7FFFFFFF
    clipped = jnp.minimum(absolute, 0x43E00000)  # 448; magnitudes order like their bits
    rounded = (clipped + 0x7FFFF + ((clipped >> 20) & 1)) >> 20
    # Adding 2^14 rounds to multiples of 2^-9, the spacing of the codes below 2^-6.
    subnormal = _bits(_from_bits(clipped) + 2.0**14) - 0x46800000
    code = jnp.where(clipped < 0x3C800000, subnormal, rounded - (120 << 3))
    signed = code | ((bits >> 24) & 0x80)
    return jnp.where(absolute > 0x7F800000, 0x7F, signed).astype(jnp.uint8)


def decode_e8m0(codes: Array) -> Array:
    """E8M0 codes (uint8) to float32 `2^(code - 127)`; 0 gives the subnormal 2^-127, 255 gives NaN."""
    code = codes.astype(jnp.int32)
    bits = jnp.where(code == 0, 0x00400000, code << 23)
    return _from_bits(jnp.where(code == 255, 0x7FC00000, bits))


def power_of_two_ceiling_code(t: Array) -> Array:
    """E8M0 code of the smallest power of two >= `t`, for normal positive float32 `t`, from its bits.

    At most 254, so that a scale made here is finite; a NaN gives 255, the NaN scale.
    Source: model specification, "Power-of-two ceiling".
    """
    t = t.astype(jnp.float32)
    bits = _bits(t)
    code = jnp.minimum(((bits >> 23) & 255) + (bits & 0x7FFFFF != 0), 254)
    return jnp.where(jnp.isnan(t), 255, code).astype(jnp.uint8)


def _blocks(x: Array, size: int) -> Array:
    if x.shape[-1] % size:
        raise ValueError(f"the last axis has {x.shape[-1]} elements, not a multiple of the block of {size}")
    return x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // size, size)


def _block_maximum(blocks: Array, floor: float) -> Array:
    """Largest magnitude of the last axis and `floor`, compared as bits: compiled float maxima may lose a NaN."""
    largest = jnp.max(_bits(blocks) & 0x7FFFFFFF, axis=-1)
    return _from_bits(jnp.maximum(largest, np.float32(floor).view(np.int32)))


def _power_of_two(exponent: Array) -> Array:
    """2^exponent for -126 <= exponent <= 127."""
    return _from_bits((exponent + 127) << 23)


def _divide_by_power_of_two(x: Array, codes: Array) -> Array:
    """`x / 2^(codes - 127)` for any scale code, subnormal `x` included; scale code 255 gives NaN.

    Two factors, because 2^-127 and 2^127 have no common normal range; a subnormal `x` enters as an integer
    number of 2^-149.
    """
    exponent = 127 - codes.astype(jnp.int32)
    first = exponent >> 1
    scaled = x * _power_of_two(first) * _power_of_two(exponent - first)
    bits = _bits(x)
    count = (bits & 0x7FFFFF).astype(jnp.float32) * _power_of_two(jnp.maximum(exponent - 149, -126))
    scaled = jnp.where((bits >> 23) & 255 == 0, jnp.where(bits < 0, -count, count), scaled)
    return jnp.where(codes == 255, jnp.nan, scaled)


def _multiply_by_power_of_two(x: Array, codes: Array) -> Array:
    """`x * 2^(codes - 127)` for any scale code where `x` is normal or zero and the product is representable.

    A product below 2^-126 is built from its bits: it is an integer number of 2^-149.
    """
    exponent = codes.astype(jnp.int32) - 127
    first = exponent >> 1
    scaled = x * _power_of_two(first) * _power_of_two(exponent - first)
    # 2^(exponent + 149) only matters for codes below ~10; the limit keeps it finite.
    count = jnp.abs(x) * _power_of_two(jnp.minimum(exponent + 149, 64))
    subnormal = _from_bits(count.astype(jnp.int32) | (_bits(x) & jnp.int32(-(2**31))))
    scaled = jnp.where(count < 2.0**23, subnormal, scaled)
    return jnp.where(codes == 255, jnp.nan, scaled)


def quantize_q8(x: Array) -> tuple[Array, Array]:
    """Q8: `x` [..., K] to E4M3 codes uint8 [..., K] and E8M0 scale codes uint8 [..., K / 32].

    Source: model specification, "The three activation formats". A NaN in a block makes its scale NaN.
    """
    blocks = _blocks(x, BLOCK)
    scales = power_of_two_ceiling_code(_block_maximum(blocks, 1e-4) * RECIPROCAL_448)
    return encode_e4m3(_divide_by_power_of_two(blocks, scales[..., None])).reshape(x.shape), scales


def quantize_q4m(x: Array) -> tuple[Array, Array]:
    """Q4m (MXFP4 style): `x` [..., K] to E2M1 codes uint8 [..., K] and E8M0 scale codes uint8 [..., K / 32].

    Source: model specification, "The three activation formats". A NaN in a block makes its scale NaN.
    """
    blocks = _blocks(x, BLOCK)
    scales = power_of_two_ceiling_code(_block_maximum(blocks, 6 * 2.0**-126) * RECIPROCAL_6)
    return encode_e2m1(_divide_by_power_of_two(blocks, scales[..., None])).reshape(x.shape), scales


def quantize_q4n(x: Array) -> tuple[Array, Array]:
    """Q4n (NVFP4 style): `x` [..., K] to E2M1 codes uint8 [..., K] and E4M3 scales uint8 [..., K / 16].

    There is no tensor scale, and the scale is rounded to nearest, so that values may saturate at 6. `x / s` is never
    formed: magnitudes are compared with threshold times scale, which is exact (kernel chapter, "Quantizers", rule 3).
    A NaN in a block makes its scale NaN.
    """
    blocks = _blocks(x, BLOCK_Q4N)
    scales = encode_e4m3(jnp.minimum(_block_maximum(blocks, 6 * 2.0**-9) * RECIPROCAL_6, E4M3_MAX))
    return _e2m1_code(jnp.abs(blocks), blocks, decode_e4m3(scales)[..., None]).reshape(x.shape), scales


def fake_q8(x: Array) -> Array:
    """`x` [..., K] rounded to the Q8 grid, in the dtype of `x`.

    Computed without codes: a layer does this seven times, and compiled programs are the smaller for it. Scales lie
    between 2^-22 and 2^120, so that a plain product with a scale or its reciprocal is exact.
    """
    blocks = _blocks(x, BLOCK)
    peak = _block_maximum(blocks, 1e-4)[..., None] * RECIPROCAL_448
    scale_bits = jnp.minimum((_bits(peak) + 0x007FFFFF) & 0x7F800000, 0x7F000000)
    # The reciprocal of 2^127, the scale of an infinite block, would be a subnormal: such a block is halved apart, by a
    # factor that is no constant, or a compiler would halve the reciprocal instead.
    reciprocal = _from_bits(jnp.maximum(0x7F000000 - scale_bits, 0x00800000))
    scaled = blocks * reciprocal * jnp.where(scale_bits == 0x7F000000, 0.5, 1.0)
    scaled = jnp.clip(scaled, -E4M3_MAX, E4M3_MAX)
    normal = lax.reduce_precision(scaled, exponent_bits=8, mantissa_bits=3)
    # Below 2^-6 the grid is 2^-9. (Adding and subtracting 2^14 would round as well, but compilers cancel it.)
    small = lax.round(scaled * 2.0**9, lax.RoundingMethod.TO_NEAREST_EVEN) * 2.0**-9
    values = jnp.where(jnp.abs(scaled) < 2.0**-6, small, normal) * _from_bits(scale_bits)
    values = jnp.where(jnp.isnan(peak), jnp.nan, values)
    return values.reshape(x.shape).astype(x.dtype)


def fake_q4m(x: Array) -> Array:
    """`x` [..., K] rounded to the Q4m grid, in the dtype of `x`."""
    codes, scales = quantize_q4m(x)
    values = _multiply_by_power_of_two(decode_e2m1(_blocks_of_codes(codes, BLOCK)), scales[..., None])
    return values.reshape(x.shape).astype(x.dtype)


def fake_q4n(x: Array) -> Array:
    """`x` [..., K] rounded to the Q4n grid, in the dtype of `x`."""
    codes, scales = quantize_q4n(x)
    values = decode_e2m1(_blocks_of_codes(codes, BLOCK_Q4N)) * decode_e4m3(scales)[..., None]
    return values.reshape(x.shape).astype(x.dtype)


def _blocks_of_codes(codes: Array, size: int) -> Array:
    return codes.reshape(*codes.shape[:-1], codes.shape[-1] // size, size)


def quantize_index_key_fp8(x: Array) -> tuple[Array, Array]:
    """Index key rows `x` [..., I] to E4M3 codes uint8 [..., I] and a power-of-two scale float32 [...] per row.

    Source: kernel chapter, "Quantizers", `Q_IDX8`.
    """
    x = x.astype(jnp.float32)
    scales = power_of_two_ceiling_code(_block_maximum(x, 1e-4) * RECIPROCAL_448)
    return encode_e4m3(_divide_by_power_of_two(x, scales[..., None])), decode_e8m0(scales)


def quantize_index_query_fp8(q: Array) -> tuple[Array, Array]:
    """Index queries `q` [..., I] to E4M3 codes uint8 [..., I] and an ordinary scale float32 [...] per (token, head).

    Source: kernel chapter, "Quantizers", `Q_QRY8`.
    """
    q = q.astype(jnp.float32)
    scale = _block_maximum(q, 1e-10) * RECIPROCAL_448
    return encode_e4m3(q / scale[..., None]), scale


def dequantize_dense(codes: Array, scales: Array) -> Array:
    """Dense weight: E4M3 [..., O, K] with E8M0 [..., ceil(O / 32), ceil(K / 32)] to float32 [..., O, K]."""
    rows, columns = codes.shape[-2:]
    grid = jnp.repeat(jnp.repeat(scales, BLOCK, axis=-2), BLOCK, axis=-1)[..., :rows, :columns]
    return _multiply_by_power_of_two(decode_e4m3(codes), grid)


def dequantize_expert(packed: Array, scales: Array) -> Array:
    """Routed expert weight: packed E2M1 bytes [..., O, K / 2] with E8M0 [..., O, K / 32] to float32 [..., O, K]."""
    return _multiply_by_power_of_two(decode_e2m1(unpack_nibbles(packed)), jnp.repeat(scales, BLOCK, axis=-1))


def dequantize_rows(codes: Array, scales: Array) -> Array:
    """Engram rows: E4M3 [..., n] with E8M0 [..., n / 32] to float32 [..., n]."""
    return _multiply_by_power_of_two(decode_e4m3(codes), jnp.repeat(scales, BLOCK, axis=-1))
