"""The vision tower and aligner in float64 NumPy, one image at a time, written from the specification alone.

Plain loops over blocks and cells and the tensor names of the checkpoint; nothing is padded, packed, stacked or rounded.
Memory grows with the square of the patch count, so this is for small images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from v41jax.config import VisionConfig

NORM_EPSILON = 1e-6
"""Of the vision tower only (vision specification, "Constants")."""


def encode_image(
    tensors: Mapping[str, np.ndarray], patches: np.ndarray, patch_rows: int, patch_columns: int, config: VisionConfig
) -> np.ndarray:
    """Runs tower and aligner (vision specification, "Vision tower", "Aligner").

    Args:
      tensors: the vision tensors under their checkpoint names, any float dtype.
      patches: [patch_rows * patch_columns, channels * patch_size**2] normalised pixels in reading order.
      patch_rows, patch_columns: grid of the padded canvas.
      config: the checkpoint's vision configuration.

    Returns:
      [rows * columns, hidden size of the text model] float64, the cells of the language grid in reading order.
    """
    weights = {name: np.asarray(value).astype(np.float64) for name, value in tensors.items()}
    angles = _angles(patch_rows, patch_columns, config)
    hidden = _linear(np.asarray(patches).astype(np.float64), weights, "vision.patch_embed.proj")
    for block in range(config.num_hidden_layers):
        prefix = f"vision.blocks.{block}"
        hidden = hidden + _attention(_norm(hidden, weights[f"{prefix}.norm1.weight"]), angles, weights, prefix, config)
        normed = _norm(hidden, weights[f"{prefix}.norm2.weight"])
        gate, up = np.split(normed @ weights[f"{prefix}.mlp.w1.weight"].T, 2, axis=-1)
        hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{prefix}.mlp.w2.weight"].T
    hidden = _norm(hidden, weights["vision.norm.weight"])
    cells = merge_cells(hidden.reshape(patch_rows, patch_columns, -1), config.downsample_ratio)
    inner = gelu(_linear(cells, weights, "aligner.w1"), config.projector_hidden_act)
    return _linear(inner, weights, "aligner.w2")


def merge_cells(features: np.ndarray, ratio: int) -> np.ndarray:
    """Gathers `ratio` x `ratio` patches into one vector, channel-major (vision specification, "Aligner").

    Args:
      features: [patch_rows, patch_columns, C].
      ratio: patches a cell has on a side.

    Returns:
      [cells, C * ratio**2]; element `c * ratio**2 + dy * ratio + dx`, zero where the grid has no patch.
    """
    height, width, channels = features.shape
    cells = []
    for top in range(0, height, ratio):
        for left in range(0, width, ratio):
            block = np.zeros((channels, ratio, ratio))
            piece = features[top : top + ratio, left : left + ratio]
            block[:, : piece.shape[0], : piece.shape[1]] = piece.transpose(2, 0, 1)
            cells.append(block.reshape(-1))
    return np.stack(cells)


def rotate(vectors: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Rotates lane i with lane i + half (vision specification, "2-D rotary embedding").

    Args:
      vectors: [..., n, head width].
      angles: [n, head width / 2].
    """
    first, second = np.split(vectors, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def gelu(x: np.ndarray, kind: str) -> np.ndarray:
    """`kind` "gelu" by the error function, "gelu_pytorch_tanh" its approximation."""
    if kind == "gelu_pytorch_tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def _angles(patch_rows: int, patch_columns: int, config: VisionConfig) -> np.ndarray:
    """[patches, head width / 2]: the row's angles, then the column's."""
    quarter = config.hidden_size // config.num_attention_heads // 4
    frequencies = config.rope_theta ** (-np.arange(quarter) / quarter)
    return np.array(
        [np.concatenate([y * frequencies, x * frequencies]) for y in range(patch_rows) for x in range(patch_columns)]
    )


def _attention(
    normed: np.ndarray, angles: np.ndarray, weights: Mapping[str, np.ndarray], prefix: str, config: VisionConfig
) -> np.ndarray:
    heads = config.num_attention_heads
    queries, keys, values = (
        part.reshape(len(part), heads, -1).transpose(1, 0, 2)
        for part in np.split(_linear(normed, weights, f"{prefix}.attn.wqkv"), 3, axis=-1)
    )
    scores = rotate(queries, angles) @ rotate(keys, angles).transpose(0, 2, 1) / math.sqrt(queries.shape[-1])
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = (scores / scores.sum(axis=-1, keepdims=True)) @ values
    return _linear(mixed.transpose(1, 0, 2).reshape(len(normed), -1), weights, f"{prefix}.attn.wo")


def _norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return weight * x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + NORM_EPSILON)


def _linear(x: np.ndarray, weights: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
