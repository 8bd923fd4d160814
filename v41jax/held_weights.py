"""What an engine's options put on its devices before the pools, and that as shapes: what a plan budgets with.

Loading is `engine`'s; both fill in the same `memory_budget.Held`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from checkpoints.safetensors_file import ARRAY_DTYPES
from checkpoints.schema import tensor_schema
from scheduler.runtime_config import EngineConfig
from v41jax.config import ModelConfig
from v41jax.draft_parameters import draft_leaves
from v41jax.engram_device_tables import ROWS, table_shapes
from v41jax.layers.collectives import DATA, MODEL, Parallel
from v41jax.memory_budget import Held
from v41jax.parameters import Describe, abstract_parameters, parameter_leaves
from v41jax.precision import Precision
from v41jax.sharding import weight_specs
from v41jax.vision_parameters import vision_leaves


def precision_of(config: EngineConfig) -> Precision:
    """The precision policy of an engine's options."""
    return Precision(activation_dtype=jnp.dtype(config.dtype), activation_quantization=config.activation_quantization)


def accepts_images(config: EngineConfig, *, has_tower: bool, several_processes: bool) -> bool:
    """Whether an engine loads the vision tower.

    Args:
      config: its options.
      has_tower: the checkpoint has its tensors.
      several_processes: they take text only.
    """
    return not several_processes and (config.vision == "on" or (config.vision == "auto" and has_tower))


def abstract_held(config: EngineConfig, model: ModelConfig, max_model_len: int, *, sees: bool) -> Held:
    """Shapes of everything held, in the stored form of an accelerator; of tables on one device.

    Args:
      config: options.
      model: of the checkpoint, which is taken to have every scope.
      max_model_len: positions the RoPE tables cover.
      sees: see `accepts_images`.
    """
    drafts = config.num_speculative_tokens > 0
    describe = _describe_schema(model, ("text", *(("draft",) if drafts else ()), *(("vision",) if sees else ())))
    dtype = precision_of(config).activation_dtype
    leaves = parameter_leaves(model, describe, max_model_len=max_model_len, form="stored", dtype=dtype)
    draft = draft_leaves(model, describe, form="stored", dtype=dtype) if drafts else None
    return Held(
        target=abstract_parameters(leaves),
        draft=None if draft is None else abstract_parameters(draft),
        tower=abstract_parameters(vision_leaves(model, describe)) if sees else None,
        tables=table_shapes(model, 1) if config.engram_tables == "device" else None,
    )


def on_mesh(held: Held, model: ModelConfig, parallel: Parallel) -> Held:
    """`abstract_held` with the shardings of a mesh; the tower lies whole on one chip."""
    mesh = AbstractMesh((parallel.data, parallel.model), (DATA, MODEL))

    def place(tree: Any, specs: Any) -> Any:
        return jax.tree.map(
            lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)),
            tree,
            specs,
        )

    def whole(tree: Any, spec: PartitionSpec) -> Any:
        return place(tree, jax.tree.map(lambda _: spec, tree))

    return Held(
        target=place(held.target, weight_specs(held.target, parallel)),
        draft=None if held.draft is None else place(held.draft, weight_specs(held.draft, parallel)),
        tower=whole(held.tower, PartitionSpec()),
        tables=None if held.tables is None else whole(table_shapes(model, parallel.chips), ROWS),
    )


def _describe_schema(model: ModelConfig, scopes: tuple[str, ...]) -> Describe:
    schema = tensor_schema(model, scopes=scopes)

    def describe(name: str) -> tuple[tuple[int, ...], np.dtype]:
        return schema[name].shape, np.dtype(ARRAY_DTYPES[schema[name].dtype])

    return describe
