"""Checkpoint tensors of the draft (`mtp.*`) -> the pytree of weights that drafting reads.

The stages are window-only layers that differ in nothing but their weights, so they are stacked like a run of the
backbone. Embedding, output head and RoPE table are the target's (`v41jax.parameters`).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from v41jax.config import CandidateRole, LayerMode, LayerTopology, ModelConfig, TextConfig
from v41jax.layers.linear import LinearWeight
from v41jax.parameters import (
    Describe,
    LayerLeaves,
    LayerWeights,
    TensorSource,
    WeightForm,
    describe_checkpoint,
    load_leaves,
    stack,
)

Array = jax.Array


class DraftParameters(NamedTuple):
    """Weights of the draft (DSpark specification, "Weights").

    Attributes:
      main_proj: [D, T D], of the concatenated target features.
      main_norm: [D].
      stages: weights of the stages on a leading axis; window-only layers.
      norm: [D], of the hidden state that the output head reads.
      markov_embed: [V, rank] bfloat16, W1.
      markov_head: [V, rank] bfloat16, W2.
      confidence: [1, D + rank] bfloat16.
    """

    main_proj: LinearWeight
    main_norm: Array
    stages: LayerWeights
    norm: Array
    markov_embed: Array
    markov_head: Array
    confidence: Array


def draft_text(text: TextConfig) -> TextConfig:
    """The text configuration as a draft stage sees it: its own number of experts."""
    return dataclasses.replace(
        text, n_routed_experts=text.dspark_n_routed_experts, num_experts_per_tok=text.dspark_num_experts_per_tok
    )


def draft_leaves(config: ModelConfig, describe: Describe, *, form: WeightForm, dtype: Any) -> DraftParameters:
    """The pytree of `Leaf`s of the draft of a configuration.

    Args:
      config: of the model; must have draft stages.
      describe: tensor name -> shape and dtype, from a checkpoint or a schema.
      form: of the FP8 and FP4 weights.
      dtype: of widened weights (the activation dtype).
    """
    count = config.text.num_nextn_predict_layers
    leaves = LayerLeaves(config, describe, form, np.dtype(dtype))
    text = draft_text(config.text)
    stages = [
        leaves.layer(
            text,
            LayerTopology(stage, LayerMode.WINDOW, 0, None, None, CandidateRole.NONE, None),
            f"mtp.{stage}",
        )
        for stage in range(count)
    ]
    last = f"mtp.{count - 1}"
    return DraftParameters(
        main_proj=leaves.dense("mtp.0.main_proj"),
        main_norm=leaves.plain("mtp.0.main_norm.weight"),
        stages=jax.tree.map(lambda *parts: stack(parts), *stages),
        norm=leaves.plain(f"{last}.norm.weight"),
        markov_embed=leaves.plain(f"{last}.markov_head.embed.weight"),
        markov_head=leaves.plain(f"{last}.markov_head.head.weight"),
        confidence=leaves.plain(f"{last}.confidence_head.proj.weight"),
    )


def load_draft_parameters(
    checkpoint: TensorSource,
    *,
    form: WeightForm = "stored",
    dtype: Any = jnp.bfloat16,
    shardings: DraftParameters | None = None,
) -> DraftParameters:
    """Reads the draft's weights; the checkpoint must be open with the scope `draft`.

    Args:
      checkpoint: an open checkpoint.
      form: of the FP8 and FP4 weights.
      dtype: of widened weights (the activation dtype).
      shardings: a pytree of shardings like the result, or None for whole arrays on the default device.

    Raises:
      ValueError: a model without draft stages.
    """
    if not checkpoint.config.text.num_nextn_predict_layers:
        raise ValueError("num_nextn_predict_layers is 0: this checkpoint has no draft, serve it without speculation")
    leaves = draft_leaves(checkpoint.config, describe_checkpoint(checkpoint), form=form, dtype=dtype)
    return load_leaves(checkpoint, leaves, shardings)
