"""The index plane as the scorers read it: formats, the query on the plane's grid, decoded keys, the sum over heads.

Functions on values, shared by the plain definitions of `index_scores` and `candidate_scores` and by the front ends of
their kernels. Letters: `N` query rows, `Hi` index heads, `I` index width, `M` keys.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels import plane_layouts
from pallas_kernels.rounding import round_to
from v41jax.quantization import (
    BLOCK,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    fake_q4m,
    quantize_index_query_fp8,
    quantize_q4m,
    unpack_nibbles,
)

Array = jax.Array

FORMATS = ("float", "fp8", "fp4")


def plane_faults(width: int, values: Array, scales: Array | None, index_format: str) -> list[str]:
    """What is wrong with the plane's arrays for `index_format`; empty when all fits.

    Args:
      width: I.
      values: float [pages, rows, I]; fp8 [pages, rows, I] uint8; fp4 [pages, rows, I / 2] uint8.
      scales: float None; fp8 [pages, rows] float32; fp4 [pages, rows, I / 32] uint8.

    fp8 and fp4 may also be as `plane_layouts.to_lanes` gives them.
    """
    if index_format not in FORMATS:
        return [f"index_format {index_format!r} is none of {', '.join(FORMATS)}"]
    faults = []
    if values.dtype == jnp.uint8 and plane_layouts.in_lanes(width, values, scales, index_format):
        kept = plane_layouts.scale_dtype(index_format)
        return faults if scales is not None and scales.dtype == kept else [f"scales are not {jnp.dtype(kept).name}"]
    row = width // 2 if index_format == "fp4" else width
    if values.ndim != 3 or values.shape[-1] != row:
        faults.append(f"values are {values.shape}, not [pages, rows, {row}] for {index_format} keys of width {width}")
    if (values.dtype == jnp.uint8) != (index_format != "float"):
        faults.append(f"values are {values.dtype}, which is not how {index_format} keys are stored")
    expected = {
        "float": None,
        "fp8": (values.shape[:2], jnp.float32),
        "fp4": ((*values.shape[:2], width // BLOCK), jnp.uint8),
    }[index_format]
    if expected is None:
        if scales is not None:
            faults.append("float keys have no scales, pass None")
    elif scales is None or scales.shape != expected[0] or scales.dtype != expected[1]:
        found = "None" if scales is None else f"{scales.dtype} {scales.shape}"
        faults.append(f"scales are {found}, not {jnp.dtype(expected[1]).name} {expected[0]}")
    return faults


def rows_in_page(width: int, values: Array, scales: Array | None, index_format: str) -> int:
    """Rows of a page of the plane, whichever layout it has."""
    if scales is not None and plane_layouts.in_lanes(width, values, scales, index_format):
        return plane_layouts.rows_of(values, scales, index_format)
    return values.shape[1]


def logical_plane(width: int, values: Array, scales: Array | None, index_format: str) -> tuple[Array, Array | None]:
    """The plane as logical rows; a copy where it is held as a TPU kernel reads it."""
    if scales is not None and plane_layouts.in_lanes(width, values, scales, index_format):
        return plane_layouts.from_lanes(values, scales, index_format)
    return values, scales


def quantized_query(
    query: Array, head_weights: Array, *, index_format: str, quantize_query: bool, fold: bool
) -> tuple[Array, Array, Array | None]:
    """The query as the plane's grid sees it.

    Args:
      query: [N, Hi, I], rounded to the activation dtype and by no quantizer.
      head_weights: [N, Hi] float32.
      index_format: "float", "fp8" or "fp4".
      quantize_query: False leaves the query as it is.
      fold: multiply the FP8 query scale into the head weights, as float32 scores want it; otherwise it is returned.

    Returns:
      operand [N, Hi, I]: bfloat16 where that is exact, else float32; weights [N, Hi] float32; the query scale
      [N, Hi] float32 still to be applied to the dot, or None.
    """
    if not quantize_query or index_format == "float":
        return query.astype(jnp.float32), head_weights, None
    if index_format == "fp4":
        return fake_q4m(query).astype(jnp.bfloat16), head_weights, None
    codes, scale = quantize_index_query_fp8(query)
    operand = decode_e4m3(codes).astype(jnp.bfloat16)
    if fold:
        return operand, head_weights * scale, None
    return operand, head_weights, scale


def float16_query(query: Array, head_weights: Array, index_format: str) -> tuple[Array, Array]:
    """The quantized query as exact float16 numbers of at most 448, its scale folded into the head weights.

    A Q4m head is held relative to half its largest group scale; a group 2^24 below that one vanishes, which changes no
    float32 sum.

    Args:
      query: [N, Hi, I] activation dtype.
      head_weights: [N, Hi] float32.
      index_format: "fp8" or "fp4".

    Returns:
      operand [N, Hi, I] float16; weights [N, Hi] float32.
    """
    if index_format == "fp8":
        codes, scale = quantize_index_query_fp8(query)
        return decode_e4m3(codes).astype(jnp.float16), head_weights * scale
    codes, groups = quantize_q4m(query)
    operand_scale, scale = relative_scales(groups)
    operand = decode_e2m1(codes) * jnp.repeat(operand_scale, BLOCK, axis=-1)
    return operand.astype(jnp.float16), head_weights * scale


def relative_scales(groups: Array) -> tuple[Array, Array]:
    """E8M0 codes of a row's groups, relative to the largest.

    Args:
      groups: [..., G] uint8.

    Returns:
      scales [..., G] float32, 2 for the largest group and not below 2^-38; the factor [...] float32 still to be
      applied, half the largest scale, NaN where a code is NaN.
    """
    codes = groups.astype(jnp.int32)
    largest = jnp.max(codes, axis=-1)
    scales = decode_e8m0(jnp.maximum(128 + codes - largest[..., None], 89))
    return scales, jnp.where(largest == 255, jnp.nan, decode_e8m0(jnp.maximum(largest - 1, 0)))


def decoded_keys(values: Array, scales: Array | None, index_format: str) -> tuple[Array, Array | None]:
    """Stored key rows to numbers that bfloat16 holds exactly.

    Args:
      values, scales: rows of the plane, [..., I] (fp4 [..., I / 2]) and [...] (fp4 [..., I / 32]).

    Returns:
      keys [..., I] float32 (in bfloat16's grid for fp8 and fp4) and the row scale [...] float32 still to be applied
      to the dot (fp8), or None.
    """
    if index_format == "float":
        return values.astype(jnp.float32), None
    if index_format == "fp8":
        return decode_e4m3(values), scales
    assert scales is not None
    codes = decode_e2m1(unpack_nibbles(values))
    return codes * jnp.repeat(decode_e8m0(scales), BLOCK, axis=-1), None


def score_rows(
    operand: Array,
    weights: Array,
    query_scale: Array | None,
    keys: Array,
    key_scale: Array | None,
    score_dtype: DTypeLike,
) -> Array:
    """Scores of every query row against every key.

    Args:
      operand: [N, Hi, I] from `quantized_query`.
      weights: [N, Hi] float32.
      query_scale: [N, Hi] float32 or None.
      keys: [M, I] float32 from `decoded_keys`.
      key_scale: [M] float32 or None.
      score_dtype: bfloat16 rounds the dot, each product with a head weight, and the sum.

    Returns:
      [N, M] float32. Source: kernel chapter, "Index scorer over the paged plane".
    """
    dots = jnp.einsum(
        "nhi,mi->nhm",
        operand,
        keys.astype(operand.dtype),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    if key_scale is not None:
        dots = dots * key_scale
    if query_scale is not None:
        dots = dots * query_scale[..., None]
    rounded = jnp.dtype(score_dtype) != jnp.float32
    if rounded:
        dots = round_to(dots, score_dtype).astype(jnp.float32)
    terms = jnp.maximum(dots, 0) * weights[..., None]
    if rounded:
        terms = round_to(terms, score_dtype).astype(jnp.float32)
    scores = jnp.sum(terms, axis=1)
    return round_to(scores, score_dtype).astype(jnp.float32) if rounded else scores
