"""Checkpoint tensors -> the pytree of weights that `forward` reads.

Consecutive layers that differ in nothing but their weights form a `Run` whose weights are stacked, so that the
compiled program does not grow with their number. Every leaf knows how to read any slice of itself, which is what
keeps the memory of a load at the weights kept plus one leaf, and what lets each host of a pod read its own shards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from checkpoints.safetensors_file import ARRAY_DTYPES
from checkpoints.schema import tensor_schema
from pallas_kernels.grouped_experts.arrangement import BLOCK_DIMS, arranged
from v41jax.config import LayerMode, LayerTopology, ModelConfig, TextConfig
from v41jax.layers.attention import AttentionWeights
from v41jax.layers.compressor import CompressorWeights
from v41jax.layers.engram import EngramWeights
from v41jax.layers.hyper_connections import MixWeights
from v41jax.layers.indexer import IndexerWeights
from v41jax.layers.linear import LinearWeight
from v41jax.layers.moe import FeedForwardWeights, MoeWeights, RouterWeights
from v41jax.layers.rope import RopeTable, build_table, plain_frequencies, yarn_frequencies
from v41jax.layers.stacks import OfRun
from v41jax.quantization_numpy import dequantize_dense, dequantize_expert

Array = jax.Array
Tree = TypeVar("Tree")

WeightForm = Literal["stored", "arranged", "dequantized"]
"""`stored`: FP8 and FP4 codes with their scales. `arranged`: the same, and FP4 codes are put in the order of the GPU
kernels at load, on one device. `dequantized`: widened to the activation dtype at load."""

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class LayerWeights(NamedTuple):
    """Weights of one layer, or of a run of layers with a leading axis.

    Attributes:
      attn_norm: [D].
      ffn_norm: [D].
      attn_mix: hyper-connection weights of the attention sublayer.
      ffn_mix: same of the FFN sublayer.
      attention: see there.
      compressor: FULL layers only.
      indexer: FULL and REINDEX layers only.
      moe: see there.
      engram: Engram layers only.
    """

    attn_norm: Array | OfRun
    ffn_norm: Array | OfRun
    attn_mix: MixWeights
    ffn_mix: MixWeights
    attention: AttentionWeights
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None
    moe: MoeWeights
    engram: EngramWeights | None


class Parameters(NamedTuple):
    """Everything `forward` reads that does not change between steps.

    Attributes:
      embed: [V, D] bfloat16.
      norm: [D] bfloat16.
      head: [V, D] bfloat16; dequantized weights have it in the activation dtype, so that no step widens it.
      plain: RoPE table of ratio-0 layers, [max_model_len, dr / 2] float32.
      yarn: RoPE table of the other layers.
      runs: weights of each `Run` of `plan_runs`, stacked on a leading axis.
    """

    embed: Array
    norm: Array
    head: Array
    plain: RopeTable
    yarn: RopeTable
    runs: tuple[LayerWeights, ...]


class Run(NamedTuple):
    """Consecutive layers that differ in their weights only.

    Attributes:
      layers: layer numbers.
      topology: of the first; the others differ in `index` only.
    """

    layers: tuple[int, ...]
    topology: LayerTopology


def plan_runs(config: ModelConfig) -> tuple[Run, ...]:
    """Groups the backbone's layers; FULL, REINDEX and Engram layers are runs of their own."""
    runs: list[Run] = []
    for topology in config.layers:
        alone = topology.mode in (LayerMode.FULL, LayerMode.REINDEX) or topology.engram is not None
        previous = runs[-1] if runs else None
        if (
            previous is not None
            and not alone
            and dataclasses.replace(previous.topology, index=topology.index) == topology
        ):
            runs[-1] = Run((*previous.layers, topology.index), previous.topology)
        else:
            runs.append(Run((topology.index,), topology))
    return tuple(runs)


class TensorSource(Protocol):
    """What a load needs of a checkpoint."""

    config: ModelConfig

    def tensor(self, name: str) -> np.ndarray:
        """Read-only view of one tensor."""
        ...


Index = tuple[slice, ...]

Describe = Callable[[str], tuple[tuple[int, ...], np.dtype]]
"""Tensor name -> shape and dtype."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One weight array that can read any slice of itself.

    Attributes:
      shape: dimensions.
      dtype: of the array.
      fill: (checkpoint, one slice per dimension, array of the slice's shape to be filled).
      names: tensors it is made of; empty for what is computed.
      arranged: packed experts that are put in the order of the GPU kernels once they are on the device; `shape` and
        `dtype` are those of what is read.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    fill: Callable[[TensorSource, Index, np.ndarray], None]
    names: tuple[str, ...] = ()
    arranged: bool = False

    @property
    def held(self) -> jax.ShapeDtypeStruct:
        """What lies on the device after the load."""
        whole = jax.ShapeDtypeStruct(self.shape, self.dtype)
        return jax.eval_shape(arranged, whole) if self.arranged else whole

    def read(self, checkpoint: TensorSource, index: Index | None = None) -> np.ndarray:
        """The slice `index`, or all of it, in memory of its own."""
        index = tuple(slice(0, size) for size in self.shape) if index is None else index
        shape = tuple(len(range(*piece.indices(size))) for piece, size in zip(index, self.shape))
        out = aligned_empty(shape, self.dtype)
        self.fill(checkpoint, index, out)
        return out


def leaf_of(
    shape: tuple[int, ...], dtype: np.dtype, names: tuple[str, ...], make: Callable[..., np.ndarray] | None = None
) -> Leaf:
    """A leaf made from whole tensors, whose file pages are let go afterwards.

    Args:
      shape: of the leaf; what `make` returns is reshaped to it.
      dtype: of the leaf.
      names: tensors to read.
      make: called with them; None takes the only one as it is.
    """

    def fill(checkpoint: TensorSource, index: Index, out: np.ndarray) -> None:
        tensors = [checkpoint.tensor(name) for name in names]
        value = tensors[0] if make is None else make(*tensors)
        out[...] = value.reshape(shape)[index].astype(dtype, copy=False)

    return Leaf(shape, dtype, fill, names)


def stack(leaves: Iterable[Leaf]) -> Leaf:
    """Leaves of equal shape under one new leading axis; a slice reads only the leaves it needs."""
    parts = tuple(leaves)

    def fill(checkpoint: TensorSource, index: Index, out: np.ndarray) -> None:
        for position, part in enumerate(parts[index[0]]):
            part.fill(checkpoint, index[1:], out[position])

    names = tuple(name for part in parts for name in part.names)
    return Leaf((len(parts), *parts[0].shape), parts[0].dtype, fill, names, parts[0].arranged)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialized array on a 64-byte boundary, which JAX on a CPU adopts without a copy."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    buffer = np.empty(size + 64, np.uint8)
    offset = -buffer.ctypes.data % 64
    return buffer[offset : offset + size].view(dtype).reshape(shape)


class LayerLeaves:
    """Leaves of the tensors of one checkpoint layout; methods name what is done to a stored tensor."""

    def __init__(self, config: ModelConfig, describe: Describe, form: WeightForm, dtype: np.dtype):
        self.describe = describe
        self.form = form
        self.dtype = np.dtype(dtype)
        self.wide_dtype = self.dtype if form == "dequantized" else BFLOAT16
        self.packed_experts = config.expert_dtype == "fp4"

    def plain(self, name: str) -> Leaf:
        shape, dtype = self.describe(name)
        return leaf_of(shape, dtype, (name,))

    def widened(self, name: str, dtype: np.dtype, shape: tuple[int, ...] | None = None) -> Leaf:
        """An FP8 tensor with its 32 x 32 scales multiplied in, optionally reshaped."""
        shape = shape or self.describe(f"{name}.weight")[0]
        return leaf_of(shape, dtype, (f"{name}.weight", f"{name}.scale"), dequantize_dense)

    def dense(self, name: str) -> LinearWeight:
        if self.form == "dequantized":
            return LinearWeight(self.widened(name, self.dtype))
        return LinearWeight(self.plain(f"{name}.weight"), self.plain(f"{name}.scale"))

    def experts(self, prefix: str, count: int, matrix: str) -> LinearWeight:
        names = [f"{prefix}.{expert}.{matrix}" for expert in range(count)]
        if not self.packed_experts:
            # A lossless widening of the released experts; they have no stored form of their own here.
            return LinearWeight(stack(self.widened(name, self.wide_dtype) for name in names))
        if self.form == "dequantized":
            return LinearWeight(stack(self._widened_expert(name) for name in names))
        packed = stack(self.plain(f"{name}.weight") for name in names)
        if self.form == "arranged":
            packed = dataclasses.replace(packed, arranged=2 * packed.shape[-1] % BLOCK_DIMS == 0)
        return LinearWeight(packed, stack(self.plain(f"{name}.scale") for name in names))

    def _widened_expert(self, name: str) -> Leaf:
        rows, half = self.describe(f"{name}.weight")[0]
        return leaf_of((rows, 2 * half), self.dtype, (f"{name}.weight", f"{name}.scale"), dequantize_expert)

    def mix(self, layer: str, sublayer: str) -> MixWeights:
        return MixWeights(*(self.plain(f"{layer}.hc_{sublayer}_{part}") for part in ("fn", "base", "scale")))

    def layer(self, text: TextConfig, topology: LayerTopology, layer: str) -> LayerWeights:
        """All leaves of one layer.

        Args:
          text: `n_routed_experts` is the layer's.
          topology: of the layer.
          layer: prefix of its tensor names.
        """
        attention = f"{layer}.attn"
        group_inputs = text.num_attention_heads * text.head_dim // text.o_groups
        compressor = indexer = engram = None
        if topology.mode is LayerMode.FULL:
            compressor = CompressorWeights(
                wkv=self.plain(f"{attention}.compressor.wkv.weight"),
                wgate=self.plain(f"{attention}.compressor.wgate.weight") if topology.ratio > 1 else None,
                norm=self.plain(f"{attention}.compressor.norm.weight"),
                wk=self.plain(f"{attention}.indexer.wk.weight"),
                k_norm=self.plain(f"{attention}.indexer.k_norm.weight"),
            )
        if topology.mode in (LayerMode.FULL, LayerMode.REINDEX):
            indexer = IndexerWeights(
                wq_b=self.dense(f"{attention}.indexer.wq_b"),
                weights_proj=self.plain(f"{attention}.indexer.weights_proj.weight"),
            )
        if topology.engram is not None:
            engram = EngramWeights(
                wkv=self.dense(f"{layer}.engram.wkv"),
                q_weight=self.plain(f"{layer}.engram.q_weight"),
                k_weight=self.plain(f"{layer}.engram.k_weight"),
            )
        experts = f"{layer}.ffn.experts"
        shared = f"{layer}.ffn.shared_experts"
        return LayerWeights(
            attn_norm=self.plain(f"{layer}.attn_norm.weight"),
            ffn_norm=self.plain(f"{layer}.ffn_norm.weight"),
            attn_mix=self.mix(layer, "attn"),
            ffn_mix=self.mix(layer, "ffn"),
            attention=AttentionWeights(
                sink=self.plain(f"{attention}.attn_sink"),
                q_norm=self.plain(f"{attention}.q_norm.weight"),
                kv_norm=self.plain(f"{attention}.kv_norm.weight"),
                wq_a=self.dense(f"{attention}.wq_a"),
                wq_b=self.dense(f"{attention}.wq_b"),
                wkv=self.dense(f"{attention}.wkv"),
                # Widened in every form, as the published loader does: its input is never quantized.
                wo_a=self.widened(
                    f"{attention}.wo_a",
                    self.wide_dtype,
                    (text.o_groups, text.o_lora_rank, group_inputs),
                ),
                wo_b=self.dense(f"{attention}.wo_b"),
            ),
            compressor=compressor,
            indexer=indexer,
            moe=MoeWeights(
                router=RouterWeights(
                    *(self.plain(f"{layer}.ffn.gate.{part}") for part in ("weight", "bias", "bias_vl"))
                ),
                experts=FeedForwardWeights(
                    *(self.experts(experts, text.n_routed_experts, matrix) for matrix in ("w1", "w3", "w2"))
                ),
                shared=FeedForwardWeights(*(self.dense(f"{shared}.{matrix}") for matrix in ("w1", "w3", "w2"))),
            ),
            engram=engram,
        )


def parameter_leaves(
    config: ModelConfig,
    describe: Describe,
    *,
    max_model_len: int,
    form: WeightForm,
    dtype: Any,
) -> Parameters:
    """The pytree of `Leaf`s of a configuration.

    Args:
      config: of the model.
      describe: tensor name -> shape and dtype, from a checkpoint or a schema.
      max_model_len: positions the RoPE tables cover.
      form: of the FP8 and FP4 weights.
      dtype: of widened weights (the activation dtype).
    """
    text = config.text
    leaves = LayerLeaves(config, describe, form, np.dtype(dtype))
    stacked = []
    for run in plan_runs(config):
        layers = [leaves.layer(text, config.layers[index], f"layers.{index}") for index in run.layers]
        stacked.append(jax.tree.map(lambda *parts: stack(parts), *layers))
    return Parameters(
        embed=leaves.plain("embed.weight"),
        norm=leaves.plain("norm.weight"),
        head=leaf_of(describe("head.weight")[0], leaves.wide_dtype, ("head.weight",)),
        plain=_table_leaves(plain_frequencies(text.rope_theta, text.qk_rope_head_dim), max_model_len),
        yarn=_table_leaves(yarn_frequencies(text), max_model_len),
        runs=tuple(stacked),
    )


def _table_leaves(frequencies: np.ndarray, positions: int) -> RopeTable:
    def part(name: str) -> Leaf:
        shape = (positions, len(frequencies))
        return leaf_of(shape, np.dtype(np.float32), (), lambda: getattr(build_table(frequencies, positions), name))

    return RopeTable(part("cos"), part("sin"))


def abstract_parameters(leaves: Tree) -> Tree:
    """The same pytree of `jax.ShapeDtypeStruct`, for compiling without weights."""
    return jax.tree.map(lambda leaf: leaf.held, leaves)


def load_parameters(
    checkpoint: TensorSource,
    *,
    max_model_len: int,
    form: WeightForm = "stored",
    dtype: Any = jnp.bfloat16,
    shardings: Parameters | None = None,
) -> Parameters:
    """Reads the weights, one leaf after the other.

    Args:
      checkpoint: an open checkpoint.
      max_model_len: positions the RoPE tables cover.
      form: of the FP8 and FP4 weights.
      dtype: of widened weights (the activation dtype).
      shardings: a pytree of shardings like the result; every process then reads only its shards. None puts whole
        arrays on the default device.

    Raises:
      ValueError: the form "arranged" with shardings.
    """

    describe = describe_checkpoint(checkpoint)
    leaves = parameter_leaves(checkpoint.config, describe, max_model_len=max_model_len, form=form, dtype=dtype)
    return load_leaves(checkpoint, leaves, shardings)


def describe_checkpoint(checkpoint: TensorSource) -> Describe:
    """Shapes and dtypes of an open checkpoint's tensors."""

    def describe(name: str) -> tuple[tuple[int, ...], np.dtype]:
        tensor = checkpoint.tensor(name)
        return tensor.shape, tensor.dtype

    return describe


def describe_schema(config: ModelConfig, scope: str) -> Describe:
    """Shapes and dtypes of the tensors that a scope of a checkpoint must have."""
    schema = tensor_schema(config, (scope,))

    def describe(name: str) -> tuple[tuple[int, ...], np.dtype]:
        return schema[name].shape, np.dtype(ARRAY_DTYPES[schema[name].dtype])

    return describe


def load_leaves(checkpoint: TensorSource, leaves: Tree, shardings: Tree | None = None) -> Tree:
    """Reads a pytree of `Leaf`s, one after the other; see `load_parameters`."""
    if shardings is not None and any(leaf.arranged for leaf in jax.tree.leaves(leaves)):
        raise ValueError('weights "arranged" are for one device: load "stored" ones onto a mesh')

    def place(leaf: Leaf, sharding: jax.sharding.Sharding | None = None) -> Array:
        if sharding is not None:
            read: dict[str, np.ndarray] = {}

            def slice_of(index: Index) -> np.ndarray:
                # Replicas ask for the same slice: it is read once.
                key = str(index)
                if key not in read:
                    read[key] = leaf.read(checkpoint, index)
                return read[key]

            return jax.make_array_from_callback(leaf.shape, sharding, slice_of)
        read_whole = jax.device_put(leaf.read(checkpoint))
        # Waited for: what was read is freed before the next leaf comes, which takes as much again.
        return jax.block_until_ready(_arrange(read_whole)) if leaf.arranged else read_whole

    if shardings is None:
        return jax.tree.map(place, leaves)
    return jax.tree.map(place, leaves, shardings)


_arrange = jax.jit(arranged)


def layer_of_run(stacked: LayerWeights, place: Array | int) -> LayerWeights:
    """The weights of one layer of a run.

    What kernels read stays in the run's stack (`LinearWeight.layer`, `MixWeights.layer`, `OfRun`, `MoeWeights.layer`):
    a slice of it would be a copy.
    """
    layer = jnp.asarray(place, jnp.int32)

    def take(tree: Any) -> Any:
        return jax.tree.map(of_layer, tree, is_leaf=lambda leaf: isinstance(leaf, (LinearWeight, MixWeights)))

    def of_layer(leaf: LinearWeight | MixWeights | Array) -> LinearWeight | MixWeights | Array:
        if isinstance(leaf, MixWeights) or (isinstance(leaf, LinearWeight) and leaf.scales is not None):
            return leaf._replace(layer=layer)
        return jax.tree.map(lambda part: jax.lax.dynamic_index_in_dim(part, place, keepdims=False), leaf)

    def layer_of(tree: Any, *kept: str) -> Any:
        """A layer's weights, those named still in their stack."""
        stacks = {name: OfRun(getattr(tree, name), layer) for name in kept}
        return take(tree._replace(**dict.fromkeys(kept)))._replace(**stacks)

    moe = stacked.moe
    return layer_of(stacked._replace(attention=None, moe=None), "attn_norm", "ffn_norm")._replace(
        attention=layer_of(stacked.attention, "sink", "q_norm", "kv_norm", "wo_a"),
        moe=MoeWeights(layer_of(moe.router, "weight", "bias", "bias_vl"), moe.experts, take(moe.shared), layer),
    )


def layer_weights(params: Parameters, config: ModelConfig, layer: int) -> LayerWeights:
    """The weights of one layer, as `layer_of_run` gives them."""
    for run, stacked in zip(plan_runs(config), params.runs):
        if layer in run.layers:
            return layer_of_run(stacked, run.layers.index(layer))
    raise ValueError(f"layer {layer} is outside 0..{config.text.num_hidden_layers - 1}")
