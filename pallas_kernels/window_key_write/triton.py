"""The window key write for GPUs: one program takes one row through norm, rotation and quantizer to its place.

A row is read twice, once with neighbours exchanged, so that rotation partners meet without an exchange of registers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.arithmetic import round_to_bfloat16
from v41jax.quantization import BLOCK, decode_e4m3, decode_e8m0, quantize_q8

Array = jax.Array

NUM_WARPS = 4

SIGNED_OFFSETS = (2**31, 2**32)
"""Bytes of a byte array for which the lowering keeps 32-bit offsets although they no longer fit a signed integer."""


def unsupported(latents: Array, window: Array) -> str | None:
    """Why the kernel cannot run on these arrays, or None."""
    width = latents.shape[-1]
    if latents.dtype != jnp.bfloat16:
        return f"it takes bfloat16 latents, not {latents.dtype.name}"
    if width < BLOCK or width & (width - 1):
        return f"width {width} is not a power of two of at least {BLOCK}"
    if window.dtype == jnp.uint8 and SIGNED_OFFSETS[0] <= window.size <= SIGNED_OFFSETS[1]:
        return f"the window has {window.size} bytes; offsets between 2 and 4 GiB do not fit the lowering"
    return None


def _normed(latent: Array, norm: Array, scale: Array) -> Array:
    """Values of bfloat16 numbers, float32."""
    return round_to_bfloat16(norm * (latent * scale))


@backend.traced_once
def window_key_write(
    latents: Array,
    norm: Array,
    cos: Array,
    sin: Array,
    written: Array,
    batch_ids: Array,
    positions: Array,
    slots: Array,
    ring_offset: Array | int,
    window: Array,
    *,
    epsilon: float,
    window_format: str,
    layer: Array | int | None = None,
    interpret: bool = False,
) -> Array:
    """See the package's docstring; `unsupported` has been asked."""
    count, width = latents.shape
    if count == 0:
        return window
    layer, norm = backend.with_layer(layer, norm)
    rings, ring, _ = window.shape
    still = width - 2 * cos.shape[1]
    triton = backend.triton()

    def kernel(
        latents_ref,
        norm_ref,
        cos_ref,
        sin_ref,
        written_ref,
        batch_ref,
        positions_ref,
        slots_ref,
        offset_ref,
        layer_ref,
        _,
        window_ref,
    ):
        row = pl.program_id(0)
        dim = jnp.arange(width, dtype=jnp.int32)
        other = dim ^ 1

        def whole(index: Array) -> Array:
            return jnp.broadcast_to(index, (width,))

        latent, partner = (triton.load(latents_ref.at[whole(row), place]).astype(jnp.float32) for place in (dim, other))
        weight, partner_weight = (
            triton.load(norm_ref.at[whole(layer_ref[0]), place]).astype(jnp.float32) for place in (dim, other)
        )
        # As one row of two axes, so that the mean is the plain chain's.
        mean = jnp.mean(jnp.square(latent[None, :]), axis=1, keepdims=True)
        scale = lax.rsqrt(mean + epsilon).reshape(1)
        normed, partner = _normed(latent, weight, scale), _normed(partner, partner_weight, scale)
        moves = dim >= still
        angle = jnp.where(moves, dim - still, 0) >> 1
        turn, across = (triton.load(ref.at[whole(row), angle]) for ref in (cos_ref, sin_ref))
        turned = normed * turn + jnp.where(dim & 1 == 1, partner * across, -(partner * across))
        key = jnp.where(moves, round_to_bfloat16(turned), normed)

        live = written_ref[row]
        request = jnp.where(live, batch_ref[row], 0)
        # Past the end, and not on a place of another row: in interpret mode a masked store rewrites what was there.
        owner = jnp.where(live, offset_ref[0] + slots_ref[request], rings)
        place = lax.rem(positions_ref[row], ring)

        def put(first: int, values: Array) -> None:
            shape = values.shape
            column = first + jnp.arange(shape[0], dtype=jnp.int32)
            where = window_ref.at[jnp.broadcast_to(owner, shape), jnp.broadcast_to(place, shape), column]
            triton.store(where, values, mask=jnp.broadcast_to(live, shape))

        if window_format != "float":
            codes, scales = quantize_q8(key.reshape(width // BLOCK, BLOCK))
            if window_format == "fp8":
                put(0, codes.reshape(width))
                put(width, scales.reshape(width // BLOCK))
                return
            key = (decode_e4m3(codes) * decode_e8m0(scales)).reshape(width)
        rounded = key.astype(jnp.bfloat16)
        put(0, lax.bitcast_convert_type(rounded, jnp.uint16) if window_ref.dtype == jnp.uint16 else rounded)

    return backend.triton_call(
        kernel,
        jax.ShapeDtypeStruct(window.shape, window.dtype),
        grid=(count,),
        num_warps=NUM_WARPS,
        num_stages=1,
        interpret=interpret,
        name=f"window_key_write_{window_format}",
        input_output_aliases={10: 0},
    )(
        latents,
        norm,
        cos,
        sin,
        written,
        batch_ids,
        positions,
        slots,
        backend.int_operand(ring_offset),
        layer,
        window,
    )
