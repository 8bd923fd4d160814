"""Tables of the rotary position embedding, built on the host; `pallas_kernels.rotation` rotates by them.

They are built in NumPy because angles reach a million radians, where an accelerator's range reduction is not
to be trusted and one ulp can flip a later quantization.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from v41jax.config import TextConfig

Array = jax.Array


class RopeTable(NamedTuple):
    """Cosines and sines by position.

    Attributes:
      cos: [positions, dr / 2] float32.
      sin: [positions, dr / 2] float32.
    """

    cos: Array
    sin: Array


def plain_frequencies(base: float, rotary_dim: int) -> np.ndarray:
    """`1 / base^(2i / dr)`: float64 power rounded once, then a float32 reciprocal; [dr / 2] float32."""
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
    return np.float32(1.0) / np.power(np.float64(base), exponents).astype(np.float32)


def yarn_frequencies(text: TextConfig) -> np.ndarray:
    """Frequencies of layers of ratio > 0, [dr / 2] float32 (model specification, "RoPE")."""
    rotary_dim = text.qk_rope_head_dim
    yarn = text.rope_scaling
    frequencies = plain_frequencies(text.compress_rope_theta, rotary_dim)

    def correction(turns: float) -> float:
        span = yarn.original_max_position_embeddings / (turns * 2 * math.pi)
        return rotary_dim * math.log(span) / (2 * math.log(text.compress_rope_theta))

    low = max(math.floor(correction(yarn.beta_fast)), 0)
    high = min(math.ceil(correction(yarn.beta_slow)), rotary_dim - 1)
    width = np.float32(max(high - low, 1e-3))
    ramp = np.clip((np.arange(rotary_dim // 2, dtype=np.float32) - np.float32(low)) / width, 0, 1)
    keep = np.float32(1.0) - ramp
    # `1 - keep`, not `ramp`: in float32 they differ by an ulp, and the released frequencies have the former.
    slowed = (frequencies / np.float32(yarn.factor)) * (np.float32(1.0) - keep)
    return (slowed + frequencies * keep).astype(np.float32)


def build_table(frequencies: np.ndarray, positions: int) -> RopeTable:
    """Table of positions 0 .. positions - 1: float32 angles, cosine and sine in float64, rounded to float32.

    Args:
      frequencies: [dr / 2] float32.
      positions: number of rows.
    """
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies[None, :]
    cos = np.empty_like(angles)
    sin = np.empty_like(angles)
    # In blocks: the float64 angles of a million positions would be half a gigabyte.
    for start in range(0, positions, 65536):
        block = angles[start : start + 65536].astype(np.float64)
        cos[start : start + 65536] = np.cos(block)
        sin[start : start + 65536] = np.sin(block)
    return RopeTable(cos, sin)


def at_positions(table: RopeTable, positions: Array) -> RopeTable:
    """Rows of the table: `positions` [...] int32, clamped into it -> cos and sin [..., dr / 2]."""
    index = jnp.clip(positions, 0, table.cos.shape[0] - 1)
    return RopeTable(table.cos[index], table.sin[index])
