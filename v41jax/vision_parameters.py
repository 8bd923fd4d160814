"""Loads the vision scope of a checkpoint into the pytree that `layers.vision` reads.

Only for runs that accept images; a text-only load never opens these tensors.
"""

from __future__ import annotations

import jax

from v41jax.config import ModelConfig
from v41jax.layers.vision import Linear, VisionBlocks, VisionParameters
from v41jax.parameters import BFLOAT16, Describe, Leaf, TensorSource, describe_checkpoint, leaf_of, stack

DELIMITERS = ("image_start", "image_newline", "image_end")
"""Tensors of the rows of `VisionParameters.delimiters`, in order."""


def vision_leaves(config: ModelConfig, describe: Describe) -> VisionParameters:
    """The pytree of `Leaf`s of tower, aligner and delimiters (model specification, "Vision tensors").

    Args:
      config: of the model.
      describe: tensor name -> shape and dtype, from a checkpoint or a schema.
    """
    blocks = range(config.vision.num_hidden_layers)

    def leaf(name: str) -> Leaf:
        # Delimiters were seen declared as float32 in one port; the values used are bfloat16 either way.
        return leaf_of(describe(name)[0], BFLOAT16, (name,))

    def stacked(name: str) -> Leaf:
        return stack(leaf(f"vision.blocks.{block}.{name}") for block in blocks)

    return VisionParameters(
        patch_embed=Linear(leaf("vision.patch_embed.proj.weight"), leaf("vision.patch_embed.proj.bias")),
        blocks=VisionBlocks(
            norm1=stacked("norm1.weight"),
            norm2=stacked("norm2.weight"),
            wqkv=Linear(stacked("attn.wqkv.weight"), stacked("attn.wqkv.bias")),
            wo=Linear(stacked("attn.wo.weight"), stacked("attn.wo.bias")),
            w1=stacked("mlp.w1.weight"),
            w2=stacked("mlp.w2.weight"),
        ),
        norm=leaf("vision.norm.weight"),
        aligner_w1=Linear(leaf("aligner.w1.weight"), leaf("aligner.w1.bias")),
        aligner_w2=Linear(leaf("aligner.w2.weight"), leaf("aligner.w2.bias")),
        delimiters=stack(leaf(name) for name in DELIMITERS),
    )


def vision_parameters(checkpoint: TensorSource) -> VisionParameters:
    """Reads tower, aligner and delimiters.

    Args:
      checkpoint: an open checkpoint; it has checked names, shapes and dtypes.

    Returns:
      host arrays, bfloat16, the blocks stacked; copies, so the checkpoint may be closed.
    """
    leaves = vision_leaves(checkpoint.config, describe_checkpoint(checkpoint))
    return jax.tree.map(lambda leaf: leaf.read(checkpoint), leaves)
