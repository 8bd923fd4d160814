"""Loads the vision scope of a checkpoint into the pytree that `layers.vision` reads.

Only for runs that accept images; a text-only load never opens these tensors.
"""

from __future__ import annotations

from typing import Protocol

import ml_dtypes
import numpy as np

from v41jax.config import ModelConfig
from v41jax.layers.vision import Linear, VisionBlocks, VisionParameters

DELIMITERS = ("image_start", "image_newline", "image_end")
"""Tensors of the rows of `VisionParameters.delimiters`, in order."""


class TensorSource(Protocol):
    """The part of an open checkpoint this module uses."""

    @property
    def config(self) -> ModelConfig:
        """The checkpoint's configuration."""

    def tensor(self, name: str) -> np.ndarray:
        """The tensor of that name as stored."""


def vision_parameters(checkpoint: TensorSource) -> VisionParameters:
    """Reads tower, aligner and delimiters (model specification, "Vision tensors").

    Args:
      checkpoint: an open checkpoint whose scopes include vision; it has checked names, shapes and dtypes.

    Returns:
      host arrays, bfloat16, the blocks stacked; copies, so the checkpoint may be closed.
    """
    blocks = range(checkpoint.config.vision.num_hidden_layers)

    def read(name: str) -> np.ndarray:
        # Delimiters were seen declared as float32 in one port; the values used are bfloat16 either way.
        return np.array(checkpoint.tensor(name), dtype=ml_dtypes.bfloat16)

    def stacked(name: str) -> np.ndarray:
        return np.stack([read(f"vision.blocks.{block}.{name}") for block in blocks])

    return VisionParameters(
        patch_embed=Linear(read("vision.patch_embed.proj.weight"), read("vision.patch_embed.proj.bias")),
        blocks=VisionBlocks(
            norm1=stacked("norm1.weight"),
            norm2=stacked("norm2.weight"),
            wqkv=Linear(stacked("attn.wqkv.weight"), stacked("attn.wqkv.bias")),
            wo=Linear(stacked("attn.wo.weight"), stacked("attn.wo.bias")),
            w1=stacked("mlp.w1.weight"),
            w2=stacked("mlp.w2.weight"),
        ),
        norm=read("vision.norm.weight"),
        aligner_w1=Linear(read("aligner.w1.weight"), read("aligner.w1.bias")),
        aligner_w2=Linear(read("aligner.w2.weight"), read("aligner.w2.bias")),
        delimiters=np.stack([read(name) for name in DELIMITERS]),
    )
