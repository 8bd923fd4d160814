"""Every tensor of the released layout: name, shape, stored dtype and role, generated from the config.

Names and shapes are those of the model specification, "Text-stack tensors" and "Vision tensors"; block sizes per role
those of "Scale naming and block rules". Reading files is not done here.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Iterator

from checkpoints.safetensors_file import ITEM_SIZES
from v41jax.config import LayerMode, ModelConfig

SCOPES = ("text", "draft", "vision")
"""What can be loaded by itself: the backbone, the draft stages, the image encoder."""

BLOCK = 32
"""Elements under one scale along a row; a dense weight shares it over as many rows too."""


class Role(enum.Enum):
    """What a tensor is for, as far as its storage rule goes."""

    EXPERT_WEIGHT = "expert weight"
    EXPERT_SCALE = "expert scale"
    TABLE_WEIGHT = "table weight"
    TABLE_SCALE = "table scale"
    DENSE_WEIGHT = "dense weight"
    DENSE_SCALE = "dense scale"
    PLAIN = "plain"

    @property
    def is_scale(self) -> bool:
        """Whether the tensor holds E8M0 codes."""
        return self in BLOCK_OF_SCALE


BLOCK_OF_SCALE = {
    Role.EXPERT_SCALE: (1, BLOCK),
    Role.TABLE_SCALE: (1, BLOCK),
    Role.DENSE_SCALE: (BLOCK, BLOCK),
}
"""Elements of the weight under one scale, rows and columns."""


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor must be on disk.

    Attributes:
      shape: stored shape; a packed FP4 weight has half its columns.
      dtype: name in the safetensors header (`F8_E4M3`, `F8_E8M0`, `I8`, `BF16`, `F32`).
      role: storage rule.
    """

    shape: tuple[int, ...]
    dtype: str
    role: Role

    @property
    def elements(self) -> int:
        """Stored elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return self.elements * ITEM_SIZES[self.dtype]

    @property
    def parameters(self) -> int:
        """Parameters held: two per packed byte, none in a scale."""
        if self.role.is_scale:
            return 0
        return self.elements * (2 if self.role is Role.EXPERT_WEIGHT else 1)


Named = Iterator[tuple[str, TensorSpec]]


def scope_of(name: str) -> str:
    """The scope a tensor name of the released layout belongs to."""
    if name.startswith("mtp."):
        return "draft"
    if name.startswith(("vision.", "aligner.", "image_")):
        return "vision"
    return "text"


def group_of(name: str, spec: TensorSpec) -> str:
    """The row of the published size table a tensor is counted in."""
    match spec.role:
        case Role.EXPERT_WEIGHT | Role.EXPERT_SCALE:
            return f"routed experts, {'draft' if scope_of(name) == 'draft' else 'backbone'}"
        case Role.TABLE_WEIGHT | Role.TABLE_SCALE:
            return "Engram tables"
        case Role.DENSE_WEIGHT | Role.DENSE_SCALE:
            return "dense fp8"
        case Role.PLAIN:
            return "everything else"


def tensor_schema(config: ModelConfig, scopes: Iterable[str] = SCOPES) -> dict[str, TensorSpec]:
    """All tensors of the given scopes, by name, in the order of the network.

    Raises:
      ValueError: for an unknown scope.
    """
    scopes = tuple(scopes)
    unknown = [scope for scope in scopes if scope not in SCOPES]
    if unknown:
        raise ValueError(f"unknown scope {unknown[0]!r}; choose from {', '.join(SCOPES)}")
    parts = {"text": _text, "draft": _draft, "vision": _vision}
    return {name: spec for scope in SCOPES if scope in scopes for name, spec in parts[scope](config)}


def _plain(name: str, *shape: int, dtype: str = "BF16") -> Named:
    yield name, TensorSpec(shape, dtype, Role.PLAIN)


def _dense(name: str, rows: int, columns: int) -> Named:
    yield f"{name}.weight", TensorSpec((rows, columns), "F8_E4M3", Role.DENSE_WEIGHT)
    grid = (-(-rows // BLOCK), -(-columns // BLOCK))
    yield f"{name}.scale", TensorSpec(grid, "F8_E8M0", Role.DENSE_SCALE)


def _expert(name: str, rows: int, columns: int) -> Named:
    yield f"{name}.weight", TensorSpec((rows, columns // 2), "I8", Role.EXPERT_WEIGHT)
    yield f"{name}.scale", TensorSpec((rows, columns // BLOCK), "F8_E8M0", Role.EXPERT_SCALE)


def _table(name: str, rows: int, columns: int) -> Named:
    yield f"{name}.weight", TensorSpec((rows, columns), "F8_E4M3", Role.TABLE_WEIGHT)
    yield f"{name}.scale", TensorSpec((rows, columns // BLOCK), "F8_E8M0", Role.TABLE_SCALE)


def _text(config: ModelConfig) -> Named:
    text = config.text
    hidden, head_dim, index_dim = text.hidden_size, text.head_dim, text.index_head_dim
    yield from _plain("embed.weight", text.vocab_size, hidden)
    yield from _plain("head.weight", text.vocab_size, hidden)
    yield from _plain("norm.weight", hidden)
    for layer in config.layers:
        prefix = f"layers.{layer.index}"
        yield from _layer(config, prefix, text.n_routed_experts)
        if layer.mode is LayerMode.FULL:
            compressor = f"{prefix}.attn.compressor"
            yield from _plain(f"{compressor}.wkv.weight", head_dim, hidden)
            if layer.ratio > 1:
                yield from _plain(f"{compressor}.wgate.weight", head_dim, hidden)
            yield from _plain(f"{compressor}.norm.weight", head_dim)
            yield from _plain(f"{prefix}.attn.indexer.wk.weight", index_dim, head_dim)
            yield from _plain(f"{prefix}.attn.indexer.k_norm.weight", index_dim)
        if layer.mode in (LayerMode.FULL, LayerMode.REINDEX):
            yield from _dense(f"{prefix}.attn.indexer.wq_b", text.index_n_heads * index_dim, text.q_lora_rank)
            yield from _plain(f"{prefix}.attn.indexer.weights_proj.weight", text.index_n_heads, hidden)
        if layer.engram is not None:
            rows = text.engram_num_embeddings[layer.engram]
            columns = (text.engram_max_ngram_size - 1) * text.engram_n_heads
            yield from _table(f"{prefix}.engram.embed", rows, text.engram_head_dim)
            keys_and_value = (text.hc_mult + 1) * hidden
            yield from _dense(f"{prefix}.engram.wkv", keys_and_value, columns * text.engram_head_dim)
            yield from _plain(f"{prefix}.engram.q_weight", text.hc_mult, hidden)
            yield from _plain(f"{prefix}.engram.k_weight", text.hc_mult, hidden)


def _layer(config: ModelConfig, prefix: str, experts: int) -> Named:
    """What every backbone layer and every draft stage has."""
    text = config.text
    hidden, width, streams = text.hidden_size, text.moe_intermediate_size, text.hc_mult
    heads = text.num_attention_heads * text.head_dim
    outputs = text.o_groups * text.o_lora_rank
    for sublayer in ("attn", "ffn"):
        yield from _plain(f"{prefix}.{sublayer}_norm.weight", hidden)
        mixes = streams * (streams + 2)
        yield from _plain(f"{prefix}.hc_{sublayer}_fn", mixes, streams * hidden, dtype="F32")
        yield from _plain(f"{prefix}.hc_{sublayer}_base", mixes, dtype="F32")
        yield from _plain(f"{prefix}.hc_{sublayer}_scale", 3, dtype="F32")
    yield from _plain(f"{prefix}.attn.attn_sink", text.num_attention_heads, dtype="F32")
    yield from _plain(f"{prefix}.attn.q_norm.weight", text.q_lora_rank)
    yield from _plain(f"{prefix}.attn.kv_norm.weight", text.head_dim)
    yield from _dense(f"{prefix}.attn.wq_a", text.q_lora_rank, hidden)
    yield from _dense(f"{prefix}.attn.wq_b", heads, text.q_lora_rank)
    yield from _dense(f"{prefix}.attn.wkv", text.head_dim, hidden)
    yield from _dense(f"{prefix}.attn.wo_a", outputs, heads // text.o_groups)
    yield from _dense(f"{prefix}.attn.wo_b", hidden, outputs)
    yield from _plain(f"{prefix}.ffn.gate.weight", experts, hidden)
    yield from _plain(f"{prefix}.ffn.gate.bias", experts, dtype="F32")
    yield from _plain(f"{prefix}.ffn.gate.bias_vl", experts, dtype="F32")
    for expert in range(experts):
        for matrix, shape in (("w1", (width, hidden)), ("w3", (width, hidden)), ("w2", (hidden, width))):
            yield from _expert(f"{prefix}.ffn.experts.{expert}.{matrix}", *shape)
    for matrix, shape in (("w1", (width, hidden)), ("w3", (width, hidden)), ("w2", (hidden, width))):
        yield from _dense(f"{prefix}.ffn.shared_experts.{matrix}", *shape)


def _draft(config: ModelConfig) -> Named:
    text = config.text
    hidden, last = text.hidden_size, text.num_nextn_predict_layers - 1
    for stage in range(text.num_nextn_predict_layers):
        prefix = f"mtp.{stage}"
        if stage == 0:
            yield from _dense(f"{prefix}.main_proj", hidden, len(text.dspark_target_layer_ids) * hidden)
            yield from _plain(f"{prefix}.main_norm.weight", hidden)
        yield from _layer(config, prefix, text.dspark_n_routed_experts)
        if stage == last:
            yield from _plain(f"{prefix}.norm.weight", hidden)
            yield from _plain(f"{prefix}.markov_head.embed.weight", text.vocab_size, text.dspark_markov_rank)
            yield from _plain(f"{prefix}.markov_head.head.weight", text.vocab_size, text.dspark_markov_rank)
            yield from _plain(f"{prefix}.confidence_head.proj.weight", 1, hidden + text.dspark_markov_rank)


def _vision(config: ModelConfig) -> Named:
    vision, hidden = config.vision, config.text.hidden_size
    width = vision.hidden_size
    for name in ("image_start", "image_end", "image_newline"):
        yield from _plain(name, hidden)
    yield from _plain("vision.patch_embed.proj.weight", width, 3 * vision.patch_size**2)
    yield from _plain("vision.patch_embed.proj.bias", width)
    for block in range(vision.num_hidden_layers):
        prefix = f"vision.blocks.{block}"
        yield from _plain(f"{prefix}.norm1.weight", width)
        yield from _plain(f"{prefix}.norm2.weight", width)
        yield from _plain(f"{prefix}.attn.wqkv.weight", 3 * width, width)
        yield from _plain(f"{prefix}.attn.wqkv.bias", 3 * width)
        yield from _plain(f"{prefix}.attn.wo.weight", width, width)
        yield from _plain(f"{prefix}.attn.wo.bias", width)
        yield from _plain(f"{prefix}.mlp.w1.weight", 2 * vision.intermediate_size, width)
        yield from _plain(f"{prefix}.mlp.w2.weight", width, vision.intermediate_size)
    yield from _plain("vision.norm.weight", width)
    yield from _plain("aligner.w1.weight", hidden, width * vision.downsample_ratio**2)
    yield from _plain("aligner.w1.bias", hidden)
    yield from _plain("aligner.w2.weight", hidden, hidden)
    yield from _plain("aligner.w2.bias", hidden)
