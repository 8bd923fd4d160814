"""Decoding, fake quantization and SwiGLU as integer and float32 operations that every backend lowers.

Functions on values: the same code runs inside a Mosaic kernel, inside a Triton kernel and in plain XLA. No casts to
the small float types, which some targets lack; no subnormal float32 intermediates, which some targets flush; no minima
and maxima of floats, which lose a NaN on GPUs. The codecs are equal to `v41jax.quantization` to the bit, which also
encodes, and covers subnormal inputs and products.
Sources: model specification, "Quantization arithmetic", "MoE"; kernel chapter, "What the TPU toolchain accepts".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array

Q8_FLOOR_BITS = int(np.float32(1e-4).view(np.int32))
Q8_GROUP = 32
RECIPROCAL_448 = 0.002232142857142857


def float_from_bits(bits: Array) -> Array:
    """int32 bit patterns -> float32 of the same shape."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def bits_from_float(x: Array) -> Array:
    """float32 -> its int32 bit pattern."""
    return lax.bitcast_convert_type(x, jnp.int32)


def round_to_bfloat16(x: Array) -> Array:
    """float32 -> the nearest bfloat16 value, ties to even, kept as float32; NaN stays NaN.

    For kernels, which cannot call `rounding.round_to`: a cast that is widened again may be removed.
    """
    bits = bits_from_float(x)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & jnp.int32(-0x10000)
    return jnp.where(x == x, float_from_bits(rounded), x)


def decode_e2m1(codes: Array) -> Array:
    """int32 E2M1 codes 0..15 (higher bits ignored) -> float32."""
    magnitude = codes & 7
    # 0 and 1 are the subnormals 0 and 0.5; the others have their exponent and mantissa bits in place.
    value = jnp.where(
        magnitude < 2, magnitude.astype(jnp.float32) * 0.5, float_from_bits((magnitude << 22) + (126 << 23))
    )
    return jnp.where((codes & 8) != 0, -value, value)


def decode_e4m3(codes: Array) -> Array:
    """int32 E4M3 (finite, no infinity) codes 0..255 -> float32; 0x7F and 0xFF are NaN."""
    exponent = (codes >> 3) & 15
    mantissa = codes & 7
    value = jnp.where(
        exponent > 0,
        float_from_bits(((exponent + 120) << 23) | (mantissa << 20)),
        mantissa.astype(jnp.float32) * 2.0**-9,
    )
    value = jnp.where((codes & 127) == 127, jnp.float32(jnp.nan), value)
    return jnp.where((codes & 128) != 0, -value, value)


def decode_e8m0(codes: Array) -> Array:
    """int32 E8M0 codes 0..255 -> float32 powers of two; 0 is 2^-127 (a subnormal), 255 is NaN."""
    bits = jnp.where(codes == 0, 0x00400000, codes << 23)
    return float_from_bits(jnp.where(codes == 255, 0x7FC00000, bits))


def round_to_e4m3(x: Array) -> Array:
    """float32 with |x| <= 448 -> the nearest E4M3 value, ties to even, kept as float32."""
    bits = bits_from_float(x)
    sign = bits & jnp.int32(-0x80000000)
    magnitude = bits & 0x7FFFFFFF
    # Keep 3 of 23 mantissa bits: add half a unit, or just under it when the kept part is even.
    normal = float_from_bits((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) & jnp.int32(-0x100000))
    # Below 2^-6 the grid is 2^-9. Adding and subtracting a large number would be simplified away.
    steps = float_from_bits(magnitude) * 512.0
    whole = steps.astype(jnp.int32)
    rest = steps - whole.astype(jnp.float32)
    up = (rest > 0.5) | ((rest == 0.5) & ((whole & 1) == 1))
    small = (whole + up.astype(jnp.int32)).astype(jnp.float32) * 2.0**-9
    rounded = jnp.where(magnitude < (121 << 23), small, normal)
    return float_from_bits(bits_from_float(rounded) | sign)


def fake_q8_group(x: Array, axis: int = -1) -> Array:
    """Fake Q8 where `axis`, of size 32, is a group: any float dtype -> the same shape and dtype.

    NaN and infinities are as in `v41jax.quantization.fake_q8`: a NaN makes its group NaN, an infinite group has scale
    2^127. Source: model specification, "The three activation formats", row Q8.
    """
    value = x.astype(jnp.float32)
    # Magnitudes order like their bits, NaN last.
    largest = jnp.max(bits_from_float(value) & 0x7FFFFFFF, axis=axis, keepdims=True)
    peak = float_from_bits(jnp.maximum(largest, Q8_FLOOR_BITS)) * jnp.float32(RECIPROCAL_448)
    scale_bits = jnp.minimum((bits_from_float(peak) + 0x007FFFFF) & 0x7F800000, 0x7F000000)
    # The reciprocal of 2^127 would be a subnormal: an infinite group is halved apart.
    reciprocal = float_from_bits(jnp.maximum(0x7F000000 - scale_bits, 0x00800000))
    scaled = value * reciprocal * jnp.where(scale_bits == 0x7F000000, 0.5, 1.0)
    scaled = jnp.where(scaled > 448.0, 448.0, jnp.where(scaled < -448.0, -448.0, scaled))
    values = round_to_e4m3(scaled) * float_from_bits(scale_bits)
    return jnp.where(peak == peak, values, jnp.float32(jnp.nan)).astype(x.dtype)


def fake_q8(x: Array) -> Array:
    """Fake Q8 along the last axis (a multiple of 32): same shape and dtype in and out."""
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // Q8_GROUP, Q8_GROUP)
    return fake_q8_group(groups).reshape(x.shape)


def swiglu(gate: Array, up: Array, limit: float) -> Array:
    """`silu(gate) * up` with the released clamps. NaN stays NaN, and a gate of minus infinity gives NaN.

    Args:
      gate, up: of one shape, any float dtype.
      limit: upper clamp of the gate, which has no lower one, and two-sided clamp of `up`; <= 0 for none.

    Returns:
      float32.
    """
    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    if limit > 0:
        gate = jnp.where(gate > limit, limit, gate)
        up = jnp.where(up > limit, limit, jnp.where(up < -limit, -limit, up))
    return gate * lax.logistic(gate) * up


def by_residue(x: Array, modulus: int) -> Array:
    """Reorders the last axis so that members whose place leaves the same residue lie together, residues ascending."""
    return jnp.concatenate([x[..., residue::modulus] for residue in range(modulus)], axis=-1)


def even_odd(x: Array) -> Array:
    """Reorders the last axis to its even members followed by its odd members."""
    return by_residue(x, 2)


def in_words(values: Array, dtype: jax.typing.DTypeLike) -> Array:
    """uint8 [..., n] as [..., n / size] of a wider unsigned `dtype`, little endian. The bytes stay where they are."""
    size = jnp.dtype(dtype).itemsize
    return lax.bitcast_convert_type(values.reshape(*values.shape[:-1], values.shape[-1] // size, size), dtype)


def shifted(words: Array, by: int) -> Array:
    """Unsigned integers shifted to the left by `by` bits, or to the right where it is negative."""
    return words << by if by > 0 else words >> -by if by < 0 else words


def scaled_e2m1(words: Array, low: int = 0, sign: int = 3) -> Array:
    """uint16 words that hold an E2M1 code among other bits -> float32 value times 2^-14.

    A float16 whose exponent and mantissa bits are the code's own is that value, subnormals included; its widening to
    float32 is one instruction where `decode_e2m1` needs a comparison and two selections.

    low: the lowest of the code's exponent and mantissa bits, which are three; sign: the bit of its sign.
    """
    bits = (shifted(words, 9 - low) & 0x0E00) | (shifted(words, 15 - sign) & 0x8000)
    return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)


def scaled_e4m3(codes: Array) -> Array:
    """uint16 E4M3 codes (higher bits ignored) -> float32 value times 2^-8; the NaN codes give 480 times 2^-8."""
    return lax.bitcast_convert_type(((codes & 127) << 7) | ((codes & 128) << 8), jnp.float16).astype(jnp.float32)


def decode_expert_halves(packed: Array, scales: Array) -> Array:
    """Expert matrix uint8 [..., K/2], uint8 E8M0 [..., K/32] -> float32 [..., K] in the order of `even_odd`.

    Keeping the low and the high nibbles apart spares an interleaving of lanes; the other operand of the product is
    reordered instead.
    """
    groups = scales.shape[-1]
    wide = packed.astype(jnp.uint16).reshape(*packed.shape[:-1], 1, groups, packed.shape[-1] // groups)
    values = scaled_e2m1(jnp.concatenate([wide, wide >> 4], axis=-3))
    powers = decode_e8m0(scales.astype(jnp.int32)) * 2.0**14
    return (values * powers[..., None, :, None]).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def unpack_e2m1(packed: Array) -> Array:
    """uint8 [..., n], two E2M1 codes a byte with the low nibble first -> float32 [..., 2n]."""
    wide = packed.astype(jnp.int32)
    pairs = jnp.stack([decode_e2m1(wide), decode_e2m1(wide >> 4)], axis=-1)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def decode_main_row(rows: Array) -> Array:
    """FP4 main rows uint8 [..., d/2 + d/16] (E2M1 values, then one E4M3 scale per 16) -> float32 [..., d]."""
    half = rows.shape[-1] * 8 // 9
    values = unpack_e2m1(rows[..., :half])
    scales = decode_e4m3(rows[..., half:].astype(jnp.int32))
    return values * jnp.repeat(scales, 16, axis=-1)


def decode_window_row(rows: Array) -> Array:
    """FP8 window rows uint8 [..., d + d/32] (E4M3 values, then one E8M0 scale per 32) -> float32 [..., d]."""
    width = rows.shape[-1] * 32 // 33
    values = decode_e4m3(rows[..., :width].astype(jnp.int32))
    scales = decode_e8m0(rows[..., width:].astype(jnp.int32))
    return values * jnp.repeat(scales, 32, axis=-1)
