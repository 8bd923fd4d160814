"""The released `config.json` as frozen dataclasses, and the layer topology it describes.

Pure Python: no jax, no files of weights. Field names are the keys of the released file. Validation collects
every fault before raising, so that a user mends a file once.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """A `config.json` that breaks one or more rules; `faults` holds one line each."""

    def __init__(self, faults: list[str]):
        self.faults = tuple(faults)
        super().__init__("; ".join(faults))


class LayerMode(enum.Enum):
    """What a layer owns besides its queries, window rows, sink and output projection."""

    WINDOW = "window"
    FULL = "full"
    REINDEX = "reindex"
    REUSE = "reuse"


class CandidateRole(enum.Enum):
    """Whether an index source publishes candidate blocks, scores only inside them, or neither."""

    NONE = "none"
    PUBLISHES = "publishes"
    CONSUMES = "consumes"


@dataclasses.dataclass(frozen=True)
class LayerTopology:
    """The resolved role of one backbone layer.

    Attributes:
      index: layer number.
      mode: see `LayerMode`.
      ratio: tokens per compressed entry; 0 means window only.
      kv_owner: layer whose compressed rows and index keys are read; None for WINDOW.
      topk_owner: layer whose selection is used; None for WINDOW.
      candidates: role in the two-level selection.
      engram: position of the layer in `engram_layer_ids`; None without an Engram.
    """

    index: int
    mode: LayerMode
    ratio: int
    kv_owner: int | None
    topk_owner: int | None
    candidates: CandidateRole
    engram: int | None


@dataclasses.dataclass(frozen=True)
class YarnConfig:
    """`rope_scaling`, used by layers of ratio > 0 only."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """`text_config`; the names are the released keys."""

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    hidden_act: str
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: YarnConfig
    compress_rope_theta: float
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    scoring_func: str
    topk_method: str
    norm_topk_prob: bool
    routed_scaling_factor: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    gate_temp: float = 1.0
    engram_seed: int = 0


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """`vision_config`; the names are the released keys."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The whole released configuration; always valid once built by `from_dict` or `from_file`."""

    text: TextConfig
    vision: VisionConfig
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    expert_dtype: str

    @functools.cached_property
    def layers(self) -> tuple[LayerTopology, ...]:
        """One `LayerTopology` per backbone layer, in order (model specification, "Topology resolution")."""
        text = self.text
        resolved = []
        kv_owner: int | None = None
        topk_owner: int | None = None
        for index in range(text.num_hidden_layers):
            ratio = text.compress_ratios[index]
            engram = text.engram_layer_ids.index(index) if index in text.engram_layer_ids else None
            if ratio == 0:
                resolved.append(LayerTopology(index, LayerMode.WINDOW, 0, None, None, CandidateRole.NONE, engram))
                continue
            if index in text.kv_source_layer_ids:
                kv_owner = index
            if index in text.index_source_layer_ids:
                topk_owner = index
            if index == kv_owner:
                mode = LayerMode.FULL
            elif index == topk_owner:
                mode = LayerMode.REINDEX
            else:
                mode = LayerMode.REUSE
            source = text.candidate_source_layer_id
            role = CandidateRole.NONE
            if source >= 0 and index == source:
                role = CandidateRole.PUBLISHES
            elif source >= 0 and index > source and index == topk_owner:
                role = CandidateRole.CONSUMES
            resolved.append(LayerTopology(index, mode, ratio, kv_owner, topk_owner, role, engram))
        return tuple(resolved)

    @functools.cached_property
    def owners(self) -> tuple[tuple[int, int], ...]:
        """(layer, ratio) of every layer that owns compressed rows and index keys, ascending."""
        return tuple((layer, self.text.compress_ratios[layer]) for layer in self.text.kv_source_layer_ids)

    @classmethod
    def from_dict(cls, root: Mapping[str, Any]) -> ModelConfig:
        """Parses and validates the nested released form.

        Raises:
          ConfigError: with every broken rule.
        """
        text = dict(root["text_config"])
        yarn = text.pop("rope_scaling")
        text["rope_scaling"] = YarnConfig(**{f.name: yarn[f.name] for f in dataclasses.fields(YarnConfig)})
        names = {f.name: f for f in dataclasses.fields(TextConfig)}
        values = {
            name: tuple(text[name]) if isinstance(text[name], list) else text[name] for name in names if name in text
        }
        vision = {f.name: root["vision_config"].get(f.name) for f in dataclasses.fields(VisionConfig)}
        return cls(
            text=TextConfig(**values),
            vision=VisionConfig(**vision),
            bos_token_id=root["bos_token_id"],
            eos_token_id=root["eos_token_id"],
            pad_token_id=root["pad_token_id"],
            image_token_id=root["image_token_id"],
            expert_dtype=root["quantization_config"]["expert_dtype"],
        )

    @classmethod
    def from_file(cls, path: Path) -> ModelConfig:
        """Reads `config.json`, or the one inside a checkpoint directory."""
        path = Path(path)
        if path.is_dir():
            path = path / "config.json"
        return cls.from_dict(json.loads(path.read_text()))
