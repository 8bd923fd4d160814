"""The released `config.json` as frozen dataclasses, and the layer topology it describes.

Pure Python: no jax, no files of weights. Field names are the keys of the released file. Types and unknown keys are
checked here, everything else by `config_rules.py`; all faults are collected before raising, so that a user mends a file
once.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from v41jax import config_rules


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
    """`vision_config`; the names are the released keys, and one more for checkpoints of other origin.

    Attributes:
      projector_hidden_act: the aligner's activation: `gelu`, the exact one of the released model (vision specification,
        "Aligner"), which is what a file without the key means, or `gelu_pytorch_tanh`, its approximation.
    """

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
    projector_hidden_act: str = "gelu"


_RELEASED = {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41"}
_RELEASED_QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
_OPTIONAL_QUANTIZATION = {"fmt": "e4m3"}
_ROOT_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")

# Keys that say nothing about the arithmetic, and those that must have one value where they occur.
_IGNORED_KEYS = frozenset(
    (
        "attention_dropout",
        "initializer_range",
        "use_cache",
        "dtype",
        "torch_dtype",
        "transformers_version",
        *_ROOT_TOKENS,
    )
)
_FIXED_TEXT = {"model_type": "deepseek_v41_text", "attention_bias": False, "tie_word_embeddings": False}
_FIXED_VISION = {"model_type": "deepseek_v41_vision"}


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

        Unknown keys of the root are ignored; anywhere below it they are faults, since a key this runtime does not know
        may change the arithmetic.

        Raises:
          ConfigError: with every broken rule.
        """
        if not isinstance(root, Mapping):
            raise ConfigError([f"must be a JSON object, not {_shown(root)}"])
        faults = list(_fixed_faults("", root, _RELEASED))
        if root.get("tie_word_embeddings", False) is not False:
            faults.append(f"tie_word_embeddings is {_shown(root['tie_word_embeddings'])}, must be False")
        faults += _quantization_faults(root)
        text = _parse_section("text_config", root, TextConfig, _FIXED_TEXT, faults)
        vision = _parse_section("vision_config", root, VisionConfig, _FIXED_VISION, faults)
        tokens: dict[str, Any] = {}
        for name in _ROOT_TOKENS:
            _parse_value("", name, int, root, tokens, faults)
        for section, values in (("text_config.", text), ("vision_config.", vision), ("", tokens)):
            faults += config_rules.take_out_of_range(section, values)
        faults += config_rules.faults_of(text, vision, tokens)
        if faults:
            raise ConfigError(faults)
        return cls(
            text=TextConfig(**text),
            vision=VisionConfig(**vision),
            expert_dtype=root["quantization_config"]["expert_dtype"],
            **tokens,
        )

    @classmethod
    def from_file(cls, path: Path | str) -> ModelConfig:
        """Reads `config.json`, or the one inside a checkpoint directory.

        Raises:
          ConfigError: with every broken rule, or the reason why the file is not JSON.
          OSError: the file cannot be read.
        """
        path = Path(path)
        if path.is_dir():
            path = path / "config.json"
        if not path.stat().st_size:
            # Not even opened: reading a pipe or a device might never end.
            raise ConfigError(["not a JSON file: it is empty"])
        try:
            root = json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=_unique_pairs)
        except (ValueError, RecursionError) as error:
            raise ConfigError([f"not a JSON file: {error}"]) from None
        return cls.from_dict(root)

    def to_dict(self) -> dict[str, Any]:
        """The nested released form; `from_dict` gives an equal config back."""
        text = dataclasses.asdict(self.text)
        text["rope_scaling"] = {"rope_type": "yarn", **text["rope_scaling"]}
        text = {key: list(value) if isinstance(value, tuple) else value for key, value in text.items()}
        vision = dataclasses.asdict(self.vision)
        for section, values in ((TextConfig, text), (VisionConfig, vision)):
            for field in dataclasses.fields(section):
                if field.default is not dataclasses.MISSING and values[field.name] == field.default:
                    del values[field.name]
        return {
            **_RELEASED,
            "dtype": "bfloat16",
            **{name: getattr(self, name) for name in _ROOT_TOKENS},
            "tie_word_embeddings": False,
            "quantization_config": {**_RELEASED_QUANTIZATION, "expert_dtype": self.expert_dtype},
            "text_config": {
                **_FIXED_TEXT,
                "attention_dropout": 0.0,
                "initializer_range": 0.02,
                "use_cache": True,
                **text,
            },
            "vision_config": {**_FIXED_VISION, **vision},
        }

    def check_parallelism(self, *, model: int, experts: int = 1, shard_index_heads: bool = False) -> None:
        """Refuses a split over `model` chips (and whole experts over `experts` chips) that would cut a unit.

        Raises:
          ConfigError: with every dimension that does not divide.
        """
        faults = config_rules.parallelism_faults(
            self.text, model=model, experts=experts, shard_index_heads=shard_index_heads
        )
        if faults:
            raise ConfigError(faults)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    for key in result:
        if sum(name == key for name, _ in pairs) > 1:
            raise ValueError(f"key {key!r} appears twice")
    return result


def _same(value: Any, expected: Any) -> bool:
    return type(value) is type(expected) and bool(value == expected)


def _fixed_faults(section: str, values: Mapping[str, Any], fixed: Mapping[str, Any]) -> Iterator[str]:
    for name, expected in fixed.items():
        if name not in values:
            yield f"{section}{name} is missing, must be {expected!r}"
        elif not _same(values[name], expected):
            yield f"{section}{name} is {_shown(values[name])}, must be {expected!r}"


def _quantization_faults(root: Mapping[str, Any]) -> Iterator[str]:
    section = root.get("quantization_config")
    if not isinstance(section, Mapping):
        yield "quantization_config is missing: without it the weights would be taken for bfloat16"
        return
    present = {name: value for name, value in _OPTIONAL_QUANTIZATION.items() if name in section}
    yield from _fixed_faults("quantization_config.", section, _RELEASED_QUANTIZATION | present)
    for name in section:
        if name not in _RELEASED_QUANTIZATION and name not in _OPTIONAL_QUANTIZATION:
            yield f"quantization_config.{name} is not a known key: it may ask for another dequantization rule"


def _parse_section(
    section: str, root: Mapping[str, Any], target: type, fixed: Mapping[str, Any], faults: list[str]
) -> dict[str, Any]:
    """Typed values of the fields of `target`; what cannot be typed is left out and reported."""
    values = root.get(section)
    if not isinstance(values, Mapping):
        faults.append(f"{section} is missing or not an object")
        return {}
    prefix = f"{section}."
    faults += _fixed_faults(prefix, values, {name: value for name, value in fixed.items() if name in values})
    hints = typing.get_type_hints(target)
    parsed: dict[str, Any] = {}
    for field in dataclasses.fields(target):
        if field.name in values or field.default is dataclasses.MISSING:
            _parse_value(prefix, field.name, hints[field.name], values, parsed, faults)
        else:
            parsed[field.name] = field.default
    for name in values:
        if name not in hints and name not in fixed and name not in _IGNORED_KEYS:
            faults.append(f"{prefix}{name} is not a known key of this architecture")
    return parsed


def _parse_value(
    prefix: str, name: str, hint: Any, values: Mapping[str, Any], parsed: dict[str, Any], faults: list[str]
) -> None:
    if name not in values and hint != float | None:
        faults.append(f"{prefix}{name} is missing")
        return
    value = values.get(name)
    if hint is YarnConfig:
        yarn = _parse_yarn(f"{prefix}{name}", value, faults)
        if yarn is not None:
            parsed[name] = yarn
        return
    try:
        parsed[name] = _typed(value, hint)
    except TypeError as error:
        faults.append(f"{prefix}{name} is {_shown(value)}, must be {error}")


def _typed(value: Any, hint: Any) -> Any:
    """`value` as `hint`; raises TypeError with the name of what was expected."""
    if hint is bool or hint is str:
        if not isinstance(value, hint):
            raise TypeError("true or false" if hint is bool else "a string")
        return value
    if hint is int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError("a whole number")
        return value
    if hint == tuple[int, ...]:
        if not isinstance(value, list | tuple):
            raise TypeError("a list of whole numbers")
        return tuple(_typed(item, int) for item in value)
    if hint == float | None and value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError("a number")
    return float(value)


def _parse_yarn(name: str, value: Any, faults: list[str]) -> YarnConfig | None:
    if not isinstance(value, Mapping):
        faults.append(f"{name} is {_shown(value)}, must be an object")
        return None
    before = len(faults)
    kinds = [value[key] for key in ("rope_type", "type") if key in value]
    if not kinds or any(kind != "yarn" for kind in kinds):
        faults.append(f"{name}.rope_type is {_shown(kinds[0]) if kinds else 'missing'}, must be 'yarn'")
    parsed: dict[str, Any] = {}
    hints = typing.get_type_hints(YarnConfig)
    for key, hint in hints.items():
        _parse_value(f"{name}.", key, hint, value, parsed, faults)
    for key in value:
        if key not in hints and key not in ("rope_type", "type"):
            faults.append(f"{name}.{key} is not a known key: no other form of YaRN is defined")
    faults += config_rules.take_out_of_range(f"{name}.", parsed)
    return YarnConfig(**parsed) if len(faults) == before else None
