"""The key write for GPUs: one program takes a few keys through norm, rotation and quantizer to their rows.

Even and odd dimensions are two tiles, so that rotation partners and nibble partners meet without any exchange. Keys
leave the plane's other rows alone: stores are masked and the plane is aliased.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend
from v41jax.quantization import (
    BLOCK,
    RECIPROCAL_6,
    RECIPROCAL_448,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    power_of_two_ceiling_code,
)

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut.

    Attributes:
      keys: keys of one program, a power of two.
      num_warps: of one program.
    """

    keys: int = 4
    num_warps: int = 4


def unsupported(keys: Array, index_format: str) -> str | None:
    """Why the kernel cannot run on these shapes, or None."""
    width = keys.shape[-1]
    if index_format not in ("fp8", "fp4"):
        return f"it writes fp8 and fp4 planes, not {index_format}"
    if keys.dtype != jnp.bfloat16:
        return f"it takes bfloat16 keys, not {keys.dtype}"
    if width < 2 * BLOCK or width & (width - 1):
        return f"width {width} is not a power of two of at least {2 * BLOCK}"
    return None


def _round_to_bfloat16(x: Array) -> Array:
    """float32 to the nearest bfloat16 number, ties to even, kept as float32; by bits, as a cast may be removed."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & jnp.int32(-0x10000)
    return jnp.where(x == x, lax.bitcast_convert_type(rounded, jnp.float32), x)


def _rotated_halves(
    whole: Array, halves: tuple[Array, Array], norms: tuple[Array, Array], cos: Array, sin: Array, epsilon: float
) -> tuple[Array, Array]:
    """Norm and rotation of even and odd dimensions, float32 [keys, I / 2] of bfloat16 numbers.

    Args:
      whole: [keys, I] bfloat16, summed as one row so that the mean is the plain chain's.
      halves, norms: even and odd dimensions of the keys and of the norm's weight.
      cos, sin: [keys, I / 2]; 1 and 0 leave a pair as it is.
    """
    mean = jnp.mean(jnp.square(whole.astype(jnp.float32)), axis=1, keepdims=True)
    scale = lax.rsqrt(mean + epsilon)
    even, odd = (
        _round_to_bfloat16(norm[None, :] * (half.astype(jnp.float32) * scale)) for norm, half in zip(norms, halves)
    )
    rotated = (even * cos - odd * sin, even * sin + odd * cos)
    even, odd = (_round_to_bfloat16(x) for x in rotated)
    return even, odd


def _encoded_fp8(even: Array, odd: Array) -> tuple[Array, Array, Array]:
    """E4M3 codes of both halves and the float32 scale [keys]."""
    peak = jnp.maximum(jnp.max(jnp.maximum(jnp.abs(even), jnp.abs(odd)), axis=1), 1e-4)
    code = power_of_two_ceiling_code(peak * RECIPROCAL_448).astype(jnp.int32)
    inverse = decode_e8m0(254 - code)[:, None]
    return encode_e4m3(even * inverse), encode_e4m3(odd * inverse), decode_e8m0(code)


def _encoded_fp4(even: Array, odd: Array) -> tuple[Array, Array]:
    """Packed bytes [keys, I / 2] and scale codes [keys, I / 32]."""
    keys, half = even.shape
    groups = 2 * half // BLOCK
    shape = (keys, groups, BLOCK // 2)
    even, odd = even.reshape(shape), odd.reshape(shape)
    peak = jnp.maximum(jnp.max(jnp.maximum(jnp.abs(even), jnp.abs(odd)), axis=2), 6 * 2.0**-126)
    code = power_of_two_ceiling_code(peak * RECIPROCAL_6).astype(jnp.int32)
    inverse = decode_e8m0(254 - code)[:, :, None]
    packed = encode_e2m1(even * inverse) | (encode_e2m1(odd * inverse) << 4)
    return packed.reshape(keys, half), code.astype(jnp.uint8)


@backend.traced_once
def index_key_write(
    keys: Array,
    norm: Array,
    cos: Array,
    sin: Array,
    requests: Array,
    entries: Array,
    block_tables: Array,
    values: Array,
    scales: Array,
    *,
    epsilon: float,
    index_format: str,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """See the package's docstring; `unsupported` has been asked."""
    config = config or Config()
    count, width = keys.shape
    if count == 0:
        return values, scales
    half = width // 2
    still = half - cos.shape[1]
    rows_in_page = values.shape[1]
    padding = -count % config.keys
    plgpu = backend.triton()
    requests = jnp.pad(requests, (0, padding), constant_values=-1)
    entries = jnp.pad(entries, (0, padding))
    padded = [jnp.pad(x, ((0, padding), (0, 0))) for x in (keys, cos, sin)]

    def kernel(keys_ref, norm_ref, cos_ref, sin_ref, requests_ref, entries_ref, tables_ref, *planes):
        values_ref, scales_ref = planes[2:]
        mine = pl.program_id(0) * config.keys + jnp.arange(config.keys, dtype=jnp.int32)
        pair = jnp.arange(half, dtype=jnp.int32)
        request, entry = requests_ref[mine], entries_ref[mine]
        live = request >= 0
        entry = jnp.where(live, entry, 0)
        page = tables_ref[jnp.where(live, request, 0), entry // rows_in_page]
        # Two dead keys must not meet a live one in interpret mode, where a masked store rewrites what was there.
        page = jnp.where(live, page, values_ref.shape[0])
        offset = entry % rows_in_page
        row, place = mine[:, None], pair[None, :]
        moves = jnp.broadcast_to(place >= still, (config.keys, half))
        angle = jnp.where(moves, place - still, 0)
        turn = jnp.where(moves, cos_ref[row, angle], 1.0), jnp.where(moves, sin_ref[row, angle], 0.0)
        norms = norm_ref[2 * pair], norm_ref[2 * pair + 1]
        halves = keys_ref[row, 2 * place], keys_ref[row, 2 * place + 1]
        whole = keys_ref[row, jnp.arange(width, dtype=jnp.int32)[None, :]]
        even, odd = _rotated_halves(whole, halves, norms, *turn, epsilon)
        wanted = jnp.broadcast_to(live[:, None], (config.keys, half))
        page_row, offset_row = page[:, None], offset[:, None]
        if index_format == "fp8":
            low, high, scale = _encoded_fp8(even, odd)
            plgpu.store(values_ref.at[page_row, offset_row, 2 * place], low, mask=wanted)
            plgpu.store(values_ref.at[page_row, offset_row, 2 * place + 1], high, mask=wanted)
            plgpu.store(scales_ref.at[page, offset], scale, mask=live)
        else:
            packed, codes = _encoded_fp4(even, odd)
            plgpu.store(values_ref.at[page_row, offset_row, place], packed, mask=wanted)
            group = jnp.arange(codes.shape[1], dtype=jnp.int32)[None, :]
            few = jnp.broadcast_to(live[:, None], codes.shape)
            plgpu.store(scales_ref.at[page_row, offset_row, group], codes, mask=few)

    stored = backend.triton_call(
        kernel,
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (values, scales)],
        grid=((count + padding) // config.keys,),
        num_warps=config.num_warps,
        num_stages=1,
        interpret=interpret,
        name=f"index_key_write_{index_format}",
        input_output_aliases={7: 0, 8: 1},
    )(padded[0], norm.astype(jnp.float32), *padded[1:], requests, entries, block_tables, values, scales)
    return stored[0], stored[1]
