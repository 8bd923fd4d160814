"""The vision tower and the aligner as pure functions, and the write of image rows over token embeddings.

Several images may be packed into one call; segment ids keep them apart and padding belongs to no segment. What the
arrays of `VisionInputs` must hold is prepared on the host by `image_encoder`.

Letters: `n` patches of a call (a bucket size), `C` cells of a call, `V` width of the tower, `H` its heads, `h` its head
width, `r` the downsample ratio, `L` blocks, `D` hidden size of the text model, `N` rows of the text batch.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from v41jax.config import VisionConfig
from v41jax.precision import Precision

NORM_EPSILON = 1e-6
"""Of the vision tower only; the text model has its own (vision specification, "Constants")."""

QUERY_BLOCK = 256
"""Queries scored at a time when there are many, which bounds the scores to [H, 256, n] float32."""


class Linear(NamedTuple):
    """A matrix product with a bias: weight [out, in], bias [out], both as stored (bfloat16)."""

    weight: Any
    bias: Any


class VisionBlocks(NamedTuple):
    """All blocks, stacked on a leading axis `L`.

    Attributes:
      norm1, norm2: [L, V].
      wqkv: weight [L, 3 V, V], bias [L, 3 V]; thirds are queries, keys, values.
      wo: weight [L, V, V], bias [L, V].
      w1: [L, 2 F, V]; halves are gate and up.
      w2: [L, V, F].
    """

    norm1: Any
    norm2: Any
    wqkv: Linear
    wo: Linear
    w1: Any
    w2: Any


class VisionParameters(NamedTuple):
    """Weights of the vision scope, bfloat16 as stored (vision specification, "Vision tower").

    Attributes:
      patch_embed: weight [V, channels * patch_size**2].
      blocks: the stacked blocks.
      norm: [V].
      aligner_w1: weight [D, V * r**2].
      aligner_w2: weight [D, D].
      delimiters: [3, D], the learned rows of span start, newline and span end, in this order.
    """

    patch_embed: Linear
    blocks: VisionBlocks
    norm: Any
    aligner_w1: Linear
    aligner_w2: Linear
    delimiters: Any


class VisionInputs(NamedTuple):
    """One call of the tower over one or more packed images.

    Attributes:
      patches: [n, channels * patch_size**2] float, normalised pixels; padding rows are ignored whatever they hold.
      cos, sin: [n, h / 2] float32, of each patch's row angles followed by its column angles; padding finite.
      segments: [n] int32, the image a patch belongs to; padding -1.
      merge_rows: [C, r**2] int32, the patch at each place of a cell, row-major in the cell; places outside the grid and
        padding cells hold a valid index.
      merge_valid: [C, r**2] bool, whether the grid has a patch there; padding cells have none.
    """

    patches: Any
    cos: Any
    sin: Any
    segments: Any
    merge_rows: Any
    merge_valid: Any


@functools.partial(jax.jit, static_argnames=("config", "precision"))
def encode_patches(
    parameters: VisionParameters, inputs: VisionInputs, *, config: VisionConfig, precision: Precision
) -> Array:
    """Runs tower and aligner (vision specification, "Vision tower", "Aligner").

    Matrix products accumulate in float32 and are rounded to the activation dtype once, after the bias; norms, rotary
    embedding, softmax and both activation functions are float32.

    Returns:
      [C, D] activation dtype, one row a cell; rows of padding cells mean nothing.
    """
    dtype = precision.activation_dtype
    real = inputs.segments >= 0
    # Padding must be finite: attention multiplies its values by zero.
    patches = jnp.where(real[:, None], inputs.patches.astype(dtype), 0)
    hidden = linear(patches, *parameters.patch_embed)

    def block(hidden: Array, weights: VisionBlocks) -> tuple[Array, None]:
        qkv = linear(rms_norm(hidden, weights.norm1), *weights.wqkv)
        hidden = hidden + linear(attention(qkv, inputs, config.num_attention_heads), *weights.wo)
        gate, up = jnp.split(linear(rms_norm(hidden, weights.norm2), weights.w1, out_dtype=jnp.float32), 2, axis=-1)
        gated = jax.nn.silu(gate) * up
        return hidden + linear(gated.astype(dtype), weights.w2), None

    hidden, _ = jax.lax.scan(block, hidden, parameters.blocks)
    cells = merge_cells(rms_norm(hidden, parameters.norm), inputs.merge_rows, inputs.merge_valid)
    inner = linear(cells, *parameters.aligner_w1, out_dtype=jnp.float32)
    return linear(gelu(inner, config.projector_hidden_act).astype(dtype), *parameters.aligner_w2)


def attention(qkv: Array, inputs: VisionInputs, heads: int) -> Array:
    """Full attention of every patch over the patches of its own image.

    Args:
      qkv: [n, 3 V] activation dtype.
      inputs: angles and segments.
      heads: number of heads.

    Returns:
      [n, V] activation dtype; zero for padding.
    """
    count = len(qkv)
    queries, keys, values = (part.reshape(count, heads, -1) for part in jnp.split(qkv, 3, axis=-1))
    queries, keys = rotate(queries, inputs.cos, inputs.sin), rotate(keys, inputs.cos, inputs.sin)
    scale = queries.shape[-1] ** -0.5
    exact = _matmul_precision(qkv.dtype)

    def attend(rows: tuple[Array, Array]) -> Array:
        block_queries, block_segments = rows
        visible = (block_segments[:, None] == inputs.segments[None, :]) & (block_segments >= 0)[:, None]
        scores = jnp.einsum("qhd,khd->hqk", block_queries, keys, preferred_element_type=jnp.float32, precision=exact)
        scores = jnp.where(visible, scores * scale, -jnp.inf)
        peak = jnp.max(scores, axis=-1, keepdims=True)
        # A padding query sees nothing: its peak is -inf and its denominator 0.
        weights = jnp.where(visible, jnp.exp(scores - jnp.where(jnp.isfinite(peak), peak, 0)), 0)
        total = jnp.sum(weights, axis=-1).T[..., None]
        mixed = jnp.einsum(
            "hqk,khd->qhd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32, precision=exact
        )
        return (mixed / jnp.where(total == 0, 1, total)).astype(qkv.dtype)

    if count <= 4 * QUERY_BLOCK:
        return attend((queries, inputs.segments)).reshape(count, -1)
    blocks = (queries.reshape(-1, QUERY_BLOCK, *queries.shape[1:]), inputs.segments.reshape(-1, QUERY_BLOCK))
    return jax.lax.map(attend, blocks).reshape(count, -1)


def rotate(vectors: Array, cos: Array, sin: Array) -> Array:
    """Rotates lane i with lane i + h / 2 in float32 (vision specification, "2-D rotary embedding").

    Args:
      vectors: [n, H, h] activation dtype.
      cos, sin: [n, h / 2] float32.

    Returns:
      [n, H, h] activation dtype.
    """
    first, second = jnp.split(vectors.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(vectors.dtype)


def merge_cells(features: Array, merge_rows: Array, merge_valid: Array) -> Array:
    """Gathers the patches of each cell, channel-major (vision specification, "Aligner").

    Args:
      features: [n, V].
      merge_rows, merge_valid: as in `VisionInputs`.

    Returns:
      [C, V * r**2]; element `channel * r**2 + place`, zero where the grid has no patch.
    """
    places = jnp.where(merge_valid[..., None], features[merge_rows], 0)
    return places.transpose(0, 2, 1).reshape(len(merge_rows), -1)


def rms_norm(x: Array, weight: Array) -> Array:
    """[n, V] normalised in float32, multiplied by `weight` [V] and rounded once to the dtype of `x`."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + NORM_EPSILON)
    return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)


def gelu(x: Array, kind: str) -> Array:
    """`kind` "gelu" by the error function, "gelu_pytorch_tanh" its approximation; they differ by at most 5e-4."""
    return jax.nn.gelu(x, approximate=kind == "gelu_pytorch_tanh")


def linear(x: Array, weight: Array, bias: Array | None = None, out_dtype: DTypeLike | None = None) -> Array:
    """`x` [n, in] times `weight` [out, in] transposed plus `bias` [out], float32 until the last rounding.

    Returns:
      [n, out] of `out_dtype`, by default the dtype of `x`.
    """
    product = jnp.einsum(
        "ni,oi->no",
        x,
        weight.astype(x.dtype),
        preferred_element_type=jnp.float32,
        precision=_matmul_precision(x.dtype),
    )
    if bias is not None:
        product = product + bias.astype(jnp.float32)
    return product.astype(out_dtype or x.dtype)


def write_image_rows(embeddings: Array, rows: Array, destinations: Array) -> Array:
    """Writes image rows over the token embeddings of their positions (vision specification, "Span and token types").

    Args:
      embeddings: [N, D] activation dtype.
      rows: [I, D] float, rows of image spans, delimiters included.
      destinations: [I] int32, row of the batch each belongs to; padding N, which writes nothing.

    Returns:
      [N, D] activation dtype.
    """
    return embeddings.at[destinations].set(rows.astype(embeddings.dtype), mode="drop")


def _matmul_precision(dtype: DTypeLike) -> jax.lax.Precision:
    """Full float32 products for float32 operands; bfloat16 products are exact in float32 anyway."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT
