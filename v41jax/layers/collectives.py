"""What a layer exchanges with the other chips of its mesh; every function is the identity on one chip.

A sharded forward is one `shard_map` over the axes `data` and `model`: inside it a layer sees its own rows and its own
part of the weights, and every byte that crosses a link is sent by a function of this file. Which array is cut along
which axis is said in `v41jax.sharding`.

With whole experts over both axes rows of one `data` shard are served by chips of others. What is sent for that, and
when which way, is in `v41jax.layers.expert_exchange` and `exchange_rule`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import backend
from pallas_kernels.rounding import round_to
from v41jax.quantization import dequantize_rows, quantize_q8

Array = jax.Array
Tree = TypeVar("Tree")

DATA, MODEL = "data", "model"
"""Names of the mesh axes."""

ExpertArrangement = Literal["intermediate", "model", "data_model"]
"""How routed experts are cut: each expert's intermediate dimension over `model`; whole experts over `model`; or whole
experts over `(data, model)`."""


ExpertExchange = Literal["auto", "gather", "ragged"]
"""How rows reach whole experts of other `data` shards: every chip gathers all rows, or a row goes only where its
experts are; "auto" lets `exchange_rule` decide."""


@dataclasses.dataclass(frozen=True)
class Parallel:
    """The mesh a forward runs on, as its layers see it; hashable and static.

    Attributes:
      data: shards that own pages and slots and run their own requests.
      model: chips that share the heads of one shard.
      experts: arrangement of the routed experts.
      exchange: how rows reach experts over both axes.
    """

    data: int = 1
    model: int = 1
    experts: ExpertArrangement = "intermediate"
    exchange: ExpertExchange = "auto"

    @property
    def chips(self) -> int:
        """Chips of the mesh."""
        return self.data * self.model

    @property
    def expert_shards(self) -> int:
        """Parts that the list of experts is cut into."""
        return {"intermediate": 1, "model": self.model, "data_model": self.chips}[self.experts]


ONE_CHIP = Parallel()


def captured(parallel: Parallel) -> bool:
    """Whether a step is one captured graph: on one NVIDIA GPU."""
    return parallel.chips == 1 and backend.current_target() == backend.Target("triton", "cuda")


def sum_over_model(partial: Array, parallel: Parallel) -> Array:
    """Sum of the `model` chips' parts in float32, rounded to the dtype of the parts: [...] -> [...].

    Source: model specification, "Where implementations disagree", row "TP reduction of `wo_b` / MoE".
    """
    if parallel.model == 1:
        return partial
    return round_to(lax.psum(partial.astype(jnp.float32), MODEL), partial.dtype)


def join_columns(part: Array, parallel: Parallel) -> Array:
    """The last axis put together from the parts of the `model` chips: [..., K / model] -> [..., K]."""
    if parallel.model == 1:
        return part
    return lax.all_gather(part, MODEL, axis=part.ndim - 1, tiled=True)


def splits_rows(count: int, parallel: Parallel) -> bool:
    """Whether `count` rows are divided among the `model` chips for work that their replicas would all repeat."""
    return parallel.model > 1 and count >= parallel.model and count % parallel.model == 0


def own_rows(tree: Tree, parallel: Parallel) -> Tree:
    """This `model` chip's part of the rows, of every leaf [N, ...]; N as `splits_rows` asks."""

    def take(leaf: Array) -> Array:
        size = leaf.shape[0] // parallel.model
        return lax.dynamic_slice_in_dim(leaf, lax.axis_index(MODEL) * size, size)

    return jax.tree.map(take, tree)


def join_rows(tree: Tree) -> Tree:
    """All rows from the parts of `own_rows`."""
    return jax.tree.map(lambda leaf: lax.all_gather(leaf, MODEL, axis=0, tiled=True), tree)


def first_expert(held: int, parallel: Parallel) -> Array | int:
    """Id of the first of the `held` experts on this chip."""
    if parallel.expert_shards == 1:
        return 0
    place = lax.axis_index(MODEL)
    if parallel.experts == "data_model":
        place = lax.axis_index(DATA) * parallel.model + place
    return place.astype(jnp.int32) * held


def exchanges_rows(parallel: Parallel) -> bool:
    """Whether experts serve the rows of other `data` shards."""
    return parallel.experts == "data_model" and parallel.data > 1


def gather_quantized(x: Array, quantized: bool) -> Array:
    """Rows of all `data` shards, [N, K] -> [data N, K], in order of the shards.

    Args:
      x: activation dtype; fake Q8 values when `quantized`, which travel as codes and scales without a change.
      quantized: the values lie on the Q8 grid.
    """
    if not quantized:
        return gather_rows(x)
    codes, scales = gather_rows(quantize_q8(x))
    return dequantize_rows(codes, scales).astype(x.dtype)


def gather_rows(tree: Tree) -> Tree:
    """Rows of all `data` shards, of every leaf [N, ...] -> [data N, ...]."""
    return jax.tree.map(lambda leaf: lax.all_gather(leaf, DATA, axis=0, tiled=True), tree)


def scatter_rows(sums: Array) -> Any:
    """Sum over the `data` shards, of which each keeps its own rows: [data N, D] float32 -> [N, D]."""
    return lax.psum_scatter(sums, DATA, scatter_dimension=0, tiled=True)


def swap_shards(parts: Array) -> Array:
    """Part d of every chip goes to `data` shard d: [data, ...] by destination -> [data, ...] by source."""
    return lax.all_to_all(parts, DATA, split_axis=0, concat_axis=0, tiled=True)


def any_chip(flag: Array) -> Array:
    """Whether a bool scalar is True on some chip of the mesh."""
    return lax.pmax(flag.astype(jnp.int32), (DATA, MODEL)) > 0
