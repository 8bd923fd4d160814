"""What an engine's options put on its devices before the pools, and that as shapes: what a plan budgets with.

Loading is `engine`'s; both fill in the same `memory_budget.Held`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from pallas_kernels.grouped_experts import reads_arranged
from scheduler.runtime_config import EngineConfig
from v41jax.config import ModelConfig, TextConfig
from v41jax.draft_parameters import DraftParameters, draft_leaves
from v41jax.engram_device_tables import ROWS, table_shapes
from v41jax.layers.collectives import DATA, MODEL, Parallel
from v41jax.layers.vision import VisionParameters
from v41jax.memory_budget import Held
from v41jax.parameters import Parameters, abstract_parameters, describe_schema, parameter_leaves
from v41jax.precision import Precision
from v41jax.sharding import weight_specs
from v41jax.vision_parameters import vision_leaves


def precision_of(config: EngineConfig) -> Precision:
    """The precision policy of an engine's options."""
    return Precision(activation_dtype=jnp.dtype(config.dtype), activation_quantization=config.activation_quantization)


def arranges_experts(config: EngineConfig, text: TextConfig, *, on_mesh: bool) -> bool:
    """Whether an engine loads weights "arranged": where the GPU kernel of the routed experts will read them.

    Args:
      config: its options.
      text: of the model.
      on_mesh: weights are cut over a mesh, on which they stay as stored.
    """
    reads = reads_arranged(text.hidden_size, text.moe_intermediate_size, config.dtype)
    return reads and config.kernels != "xla" and not on_mesh


def accepts_images(config: EngineConfig, *, has_tower: bool, several_processes: bool) -> bool:
    """Whether an engine loads the vision tower.

    Args:
      config: its options.
      has_tower: the checkpoint has its tensors.
      several_processes: they take text only.
    """
    return not several_processes and (config.vision == "on" or (config.vision == "auto" and has_tower))


def abstract_held(
    config: EngineConfig, model: ModelConfig, parallel: Parallel, max_model_len: int, *, sees: bool
) -> Held:
    """Shapes of everything held, in the stored form of an accelerator, with the shardings of a mesh. Arranged weights
    take as many bytes.

    Args:
      config: options.
      model: of the checkpoint, which is taken to have every scope.
      parallel: the mesh. The tower lies whole on one chip.
      max_model_len: positions the RoPE tables cover.
      sees: see `accepts_images`.
    """
    mesh = AbstractMesh((parallel.data, parallel.model), (DATA, MODEL))
    dtype = np.dtype(config.dtype)

    def place(tree: Any, specs: Any) -> Any:
        return jax.tree.map(
            lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)),
            tree,
            specs,
        )

    def alike(tree: Any, spec: PartitionSpec) -> Any:
        return place(tree, jax.tree.map(lambda _: spec, tree))

    target = _target(model, max_model_len, dtype)
    draft = _draft(model, dtype) if config.num_speculative_tokens > 0 else None
    return Held(
        target=place(target, weight_specs(target, parallel)),
        draft=None if draft is None else place(draft, weight_specs(draft, parallel)),
        tower=alike(_tower(model), PartitionSpec()) if sees else None,
        tables=alike(table_shapes(model, parallel.chips), ROWS) if config.engram_tables == "device" else None,
    )


@functools.lru_cache(maxsize=8)
def _target(model: ModelConfig, max_model_len: int, dtype: np.dtype) -> Parameters:
    describe = describe_schema(model, "text")
    leaves = parameter_leaves(model, describe, max_model_len=max_model_len, form="stored", dtype=dtype)
    return abstract_parameters(leaves)


@functools.lru_cache(maxsize=8)
def _draft(model: ModelConfig, dtype: np.dtype) -> DraftParameters:
    return abstract_parameters(draft_leaves(model, describe_schema(model, "draft"), form="stored", dtype=dtype))


@functools.lru_cache(maxsize=8)
def _tower(model: ModelConfig) -> VisionParameters:
    return abstract_parameters(vision_leaves(model, describe_schema(model, "vision")))
