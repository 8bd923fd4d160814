"""How weights and pools are cut over the chips of a mesh: one table from logical axes to mesh axes.

Every dimension of every array has a logical name; `MESH_AXES` says which mesh axis each name is cut along, or none.
What follows from it are the partition specs of weights, pools and steps, and the refusals of meshes that do not fit a
model. What layers exchange because of it is in `v41jax.layers.collectives`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scheduler.batch import BatchStep, EngramRows
from scheduler.pools import Pools
from v41jax.config import ModelConfig
from v41jax.layers.collectives import DATA, MODEL, ExpertArrangement, ExpertExchange, Parallel

Tree = TypeVar("Tree")

BLOCK = 32
"""Elements that share a scale of the FP8 and FP4 weights; a cut never goes through them."""

LogicalAxes = tuple[str | None, ...]


class MeshError(ValueError):
    """A mesh that a model cannot be cut over; `faults` holds one line each."""

    def __init__(self, faults: Sequence[str]):
        self.faults = tuple(faults)
        super().__init__("; ".join(self.faults))


MESH_AXES: dict[str, dict[ExpertArrangement, str | tuple[str, str] | None]] = {
    "experts": {"intermediate": None, "model": MODEL, "data_model": (DATA, MODEL)},
    "expert width": {"intermediate": MODEL, "model": None, "data_model": None},
} | {
    name: dict.fromkeys(("intermediate", "model", "data_model"), axis)
    for name, axis in {
        "heads": MODEL,
        "groups": MODEL,
        "shared width": MODEL,
        "vocabulary": MODEL,
        "embedding columns": MODEL,
        "pages": DATA,
        "slots": DATA,
        "rows": DATA,
    }.items()
}
"""Logical axis -> mesh axis, by expert arrangement. Names that are not here are whole on every chip."""

WEIGHT_AXES: dict[str, LogicalAxes] = {
    "embed": (None, "embedding columns"),
    "head": ("vocabulary", None),
    "attention.sink": ("heads",),
    "attention.wq_b": ("heads", None),
    "attention.wo_a": ("groups", None, None),
    "attention.wo_b": (None, "groups"),
    "moe.experts.w1": ("experts", "expert width", None),
    "moe.experts.w3": ("experts", "expert width", None),
    "moe.experts.w2": ("experts", None, "expert width"),
    "moe.shared.w1": ("shared width", None),
    "moe.shared.w3": ("shared width", None),
    "moe.shared.w2": (None, "shared width"),
    "markov_head": ("vocabulary", None),
}
"""Weight -> logical axes, of one layer; the scales of a weight are cut like its values. Weights that are not here
(latent projections, compressors, indexers, router, mixes, norms, Engram) are whole on every chip."""

POOL_AXES: dict[str, LogicalAxes] = {
    "main": ("pages",),
    "index_values": ("pages",),
    "index_scales": ("pages",),
    "window": (None, "slots"),
    "tail_kv": (None, "slots"),
    "tail_score": (None, "slots"),
    "cursor": ("slots",),
    "last_token": ("slots",),
}
"""Pool array -> logical axes; each `data` shard owns its pages and slots, its `model` chips hold replicas."""


def partition(axes: LogicalAxes, experts: ExpertArrangement) -> PartitionSpec:
    """The partition spec of logical axes."""
    return PartitionSpec(*(None if name is None else MESH_AXES[name][experts] for name in axes))


def _field_path(path: tuple[Any, ...]) -> str:
    return ".".join(str(entry.name) for entry in path if hasattr(entry, "name"))


def leaf_names(tree: Any) -> Any:
    """The place of every leaf, such as `runs.3.moe.experts.w1.values`, as a pytree like the given one."""

    def name(path: tuple[Any, ...], _: Any) -> str:
        return ".".join(str(getattr(entry, "name", getattr(entry, "idx", entry))) for entry in path)

    return jax.tree_util.tree_map_with_path(name, tree)


def weight_specs(params: Tree, parallel: Parallel) -> Tree:
    """Partition specs of the weights of a target, of a draft or of both (or of leaves, or abstract ones), like them.

    Weights of runs and of draft stages have one more leading axis, the layers.
    """

    def spec(path: tuple[Any, ...], _: Any) -> PartitionSpec:
        name = _field_path(path).removeprefix("target.").removeprefix("draft.")
        stacked = name.startswith(("runs.", "stages."))
        name = name.removeprefix("runs.").removeprefix("stages.").removesuffix(".values").removesuffix(".scales")
        axes = WEIGHT_AXES.get(name, ())
        return partition((None, *axes) if stacked else axes, parallel.experts)

    return jax.tree_util.tree_map_with_path(spec, params)


def pool_specs(pools: Pools, parallel: Parallel) -> Pools:
    """Partition specs of pools, like them."""
    return jax.tree_util.tree_map_with_path(lambda path, _: partition(POOL_AXES[path[0].name], parallel.experts), pools)


def step_specs(step: Tree) -> Tree:
    """Partition specs of a step's arrays: every leaf is the shards' own arrays, one after the other."""
    return jax.tree.map(lambda _: PartitionSpec(DATA), step)


def shardings(mesh: Mesh, specs: Tree) -> Tree:
    """Named shardings of a pytree of partition specs."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
    )


def make_mesh(parallel: Parallel, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh `(data, model)`; neighbours on `model` are neighbours in the list of devices.

    Raises:
      MeshError: fewer devices than the mesh has chips, or a process of the service would have none of them.
    """
    lent = devices is not None
    devices = jax.devices() if devices is None else devices
    if len(devices) < parallel.chips:
        raise MeshError(
            [
                f"a mesh of data={parallel.data}, model={parallel.model} needs {parallel.chips} devices, there are "
                f"{len(devices)}"
            ]
        )
    processes = [] if lent else [device.process_index for device in devices]
    idle = sorted(set(processes) - set(processes[: parallel.chips]))
    if idle:
        raise MeshError(
            [
                f"a mesh of data={parallel.data}, model={parallel.model} takes {parallel.chips} of {len(devices)} "
                f"devices and leaves none for process {', '.join(map(str, idle))}: start fewer processes"
            ]
        )
    return Mesh(np.array(devices[: parallel.chips]).reshape(parallel.data, parallel.model), (DATA, MODEL))


def arrangement(mesh: Mapping[str, int], whole_experts: bool, exchange: str = "auto") -> Parallel:
    """The mesh and expert arrangement of the engine's options: whole experts lie over both axes."""
    data, model = int(mesh.get(DATA, 1)), int(mesh.get(MODEL, 1))
    if not whole_experts:
        return Parallel(data, model, "intermediate")
    return Parallel(data, model, "data_model" if data > 1 else "model", cast(ExpertExchange, exchange))


def mesh_faults(config: ModelConfig, parallel: Parallel, *, drafts: bool = False) -> list[str]:
    """Every reason why a model, and its draft, cannot be cut over a mesh (runtime specification, "Divisibility")."""
    text, model = config.text, parallel.model
    faults = []
    for axis, size in ((DATA, parallel.data), (MODEL, model)):
        if size < 1:
            faults.append(f"mesh axis {axis!r} has size {size}: it must be at least 1")
    if faults:
        return faults
    for name in (
        "num_attention_heads",
        "index_n_heads",
        "o_groups",
        "moe_intermediate_size",
        "vocab_size",
        "hidden_size",
    ):
        if getattr(text, name) % model:
            faults.append(f"tensor parallel size {model} does not divide {name} {getattr(text, name)}")
    cut = {
        "moe_intermediate_size": text.moe_intermediate_size,
        "num_attention_heads * head_dim": text.num_attention_heads * text.head_dim,
        "o_groups * o_lora_rank": text.o_groups * text.o_lora_rank,
    }
    for name, size in cut.items():
        if model > 1 and size % model == 0 and size // model % BLOCK:
            faults.append(
                f"tensor parallel size {model} cuts {name} {size} into parts of {size // model}: "
                f"that goes through a quantization block of {BLOCK}"
            )
    for name in ("n_routed_experts", *(("dspark_n_routed_experts",) if drafts else ())):
        if getattr(text, name) % parallel.expert_shards:
            faults.append(f"expert parallel size {parallel.expert_shards} does not divide {name} {getattr(text, name)}")
    return faults


def check_mesh(config: ModelConfig, parallel: Parallel, *, drafts: bool = False) -> None:
    """Refuses a mesh that does not fit a model, or its draft.

    Raises:
      MeshError: with every fault of `mesh_faults`.
    """
    faults = mesh_faults(config, parallel, drafts=drafts)
    if faults:
        raise MeshError(faults)


def chip_bytes(tree: Any, specs: Any, parallel: Parallel) -> int:
    """Bytes of a pytree of arrays (or abstract ones) on each chip."""
    sizes = {DATA: parallel.data, MODEL: parallel.model}

    def one(leaf: Any, spec: PartitionSpec) -> int:
        cut = 1
        for axis in spec:
            for name in (axis,) if isinstance(axis, str) else axis or ():
                cut *= sizes[name]
        return int(np.prod(leaf.shape, dtype=np.int64)) * np.dtype(leaf.dtype).itemsize // cut

    return sum(jax.tree.leaves(jax.tree.map(one, tree, specs)))


def join_steps(steps: Sequence[BatchStep]) -> BatchStep:
    """One step of all `data` shards from their own steps, which have one shape; ids stay those of each shard."""
    return _join(steps)


def join_engram_rows(rows: Sequence[EngramRows]) -> EngramRows:
    """Engram rows of all `data` shards."""
    return _join(rows)


def _join(parts: Sequence[Tree]) -> Tree:
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *leaves: np.concatenate([np.asarray(leaf) for leaf in leaves]), *parts)
