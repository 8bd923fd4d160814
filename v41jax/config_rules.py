"""Every rule a released configuration must keep, as small generators of faults.

The rules are those of the model specification, "Validation rules", and the block sizes of its quantizers. They read
values that were already typed; a rule that needs a missing or mistyped value says nothing: that is a fault already.
Parsing is in `config.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from v41jax.engram_primes import engram_rows

BLOCK = 32
"""Elements under one activation or weight scale; matrices must not cut a block along their inputs."""

ENGRAM_VOCAB_LIMIT = 2**31
"""Row ids are int32, so no bucket count may start beyond it."""


class Unavailable(Exception):
    """A rule asked for a value that is missing or has the wrong type."""


class Values:
    """Typed values of one section by attribute; raises `Unavailable` for what could not be parsed."""

    def __init__(self, values: Mapping[str, Any]):
        self._values = values

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise Unavailable(name) from None


Rule = Callable[[Values, Values, Values], Iterator[str]]


def faults_of(text: Mapping[str, Any], vision: Mapping[str, Any], root: Mapping[str, Any]) -> list[str]:
    """One line for every broken rule that the given values can decide."""
    faults: list[str] = []
    sections = (Values(text), Values(vision), Values(root))
    for rule in RULES:
        try:
            for fault in rule(*sections):
                faults.append(fault)
        except Unavailable:
            continue
    return faults


_MINIMUM = {
    "candidate_source_layer_id": -1,
    "candidate_topk_blocks": 0,
    "candidate_block_size": 0,
    "engram_pad_token_id": 0,
    "engram_seed": 0,
    "num_nextn_predict_layers": 0,
    "dspark_noise_token_id": 0,
    "engram_max_ngram_size": 2,
    "engram_vocab_size": 2,
    "min_pixels": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "image_token_id": 0,
}
"""Smallest legal value of whole numbers that may be other than 1."""

_MAXIMUM = dict.fromkeys(("n_routed_experts", "dspark_n_routed_experts", "num_hidden_layers"), 2**16)
"""Largest legal value of whole numbers that count tensors; the others need only fit a machine."""


def take_out_of_range(section: str, values: dict[str, Any]) -> Iterator[str]:
    """Faults of whole numbers outside their range (from 1 unless listed) and of numbers that are not finite.

    Such values are removed from `values`, so that no rule divides by zero.
    """
    for name, value in list(values.items()):
        fault = _range_fault(name, value)
        if fault:
            del values[name]
            yield f"{section}{name} is {value}, must be {fault}"


def _range_fault(name: str, value: Any) -> str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return "finite"
    if isinstance(value, int) and not isinstance(value, bool):
        minimum, maximum = _MINIMUM.get(name, 1), _MAXIMUM.get(name, 2**62)
        if value < minimum:
            return f"at least {minimum}"
        if value > maximum:
            return f"at most {maximum}"
    return None


def _fixed_values(text: Values, vision: Values, root: Values) -> Iterator[str]:
    fixed = {
        "num_key_value_heads": (1, "keys and values are one latent"),
        "n_shared_experts": (1, "the layout names one shared expert"),
        "hidden_act": ("silu", "no other activation is defined"),
        "scoring_func": ("sqrtsoftplus", "the router is built for it"),
        "topk_method": ("noaux_tc", "no other selection is defined"),
    }
    for name, (expected, why) in fixed.items():
        value = text._values.get(name, expected)
        if value != expected:
            yield f"text_config.{name} is {value!r}, must be {expected!r}: {why}"


def _compress_ratios(text: Values, vision: Values, root: Values) -> Iterator[str]:
    ratios, layers, drafts = text.compress_ratios, text.num_hidden_layers, text.num_nextn_predict_layers
    for index, ratio in enumerate(ratios):
        if ratio not in (0, 1, 2):
            yield f"text_config.compress_ratios[{index}] is {ratio}, must be 0, 1 or 2"
    if len(ratios) != layers + drafts:
        yield (
            f"text_config.compress_ratios has {len(ratios)} entries, must have {layers + drafts} "
            f"(num_hidden_layers {layers} + num_nextn_predict_layers {drafts})"
        )
        return
    for index in range(layers, layers + drafts):
        if ratios[index] != 0:
            yield f"text_config.compress_ratios[{index}] is {ratios[index]}, must be 0: draft layers are window-only"


def _layer_list(text: Values, name: str) -> Iterator[str]:
    ids, layers = getattr(text, name), text.num_hidden_layers
    for layer in ids:
        if not 0 <= layer < layers:
            yield f"text_config.{name} names layer {layer}, must lie in 0..{layers - 1}"
    for left, right in itertools.pairwise(ids):
        if right <= left:
            yield f"text_config.{name} has {right} after {left}, must be strictly increasing"


def _source_lists(text: Values, vision: Values, root: Values) -> Iterator[str]:
    yield from _layer_list(text, "kv_source_layer_ids")
    yield from _layer_list(text, "index_source_layer_ids")


def _ordered_sources(text: Values) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Ratios of the backbone layers and both source lists, once they are sound enough to resolve."""
    names = ("kv_source_layer_ids", "index_source_layer_ids")
    if any(fault for name in names for fault in _layer_list(text, name)):
        raise Unavailable
    ratios = text.compress_ratios[: text.num_hidden_layers]
    if len(ratios) != text.num_hidden_layers or any(ratio not in (0, 1, 2) for ratio in ratios):
        raise Unavailable
    return ratios, text.kv_source_layer_ids, text.index_source_layer_ids


def _sources(text: Values, vision: Values, root: Values) -> Iterator[str]:
    ratios, kv_sources, index_sources = _ordered_sources(text)
    for layer in kv_sources:
        if layer not in index_sources:
            yield (
                f"text_config.kv_source_layer_ids names layer {layer}, which is missing from index_source_layer_ids: "
                "only it can make index keys for its group"
            )
    for name, sources in (("kv_source_layer_ids", kv_sources), ("index_source_layer_ids", index_sources)):
        for layer in sources:
            if ratios[layer] == 0:
                yield f"text_config.{name} names layer {layer}, whose compress ratio is 0: it has no global attention"


def _owners(text: Values, vision: Values, root: Values) -> Iterator[str]:
    ratios, kv_sources, index_sources = _ordered_sources(text)
    for layer, ratio in enumerate(ratios):
        if ratio == 0:
            continue
        owner = max((source for source in kv_sources if source <= layer), default=None)
        if owner is None:
            yield f"layer {layer} has compress ratio {ratio}, but no KV source at or before it"
            continue
        if ratios[owner] != ratio:
            yield (
                f"layer {layer} has compress ratio {ratio}, but its KV source, layer {owner}, has {ratios[owner]}: "
                "compressed entries would stand for the wrong tokens"
            )
        selector = max((source for source in index_sources if source <= layer), default=None)
        if selector is None:
            yield f"layer {layer} has compress ratio {ratio}, but no index source at or before it"
        elif selector < owner:
            yield (
                f"layer {layer} would use the selection of layer {selector}, made before its KV source, layer {owner}: "
                "stale entries of another owner"
            )


def _candidates(text: Values, vision: Values, root: Values) -> Iterator[str]:
    source = text.candidate_source_layer_id
    if source == -1:
        return
    blocks, size, topk = text.candidate_topk_blocks, text.candidate_block_size, text.index_topk
    if blocks < 1:
        yield f"text_config.candidate_topk_blocks is {blocks}, must be at least 1 with a candidate source"
    if size < 1:
        yield f"text_config.candidate_block_size is {size}, must be at least 1 with a candidate source"
    if blocks > 0 and size > 0 and blocks * size < topk:
        yield (
            f"candidate_topk_blocks {blocks} x candidate_block_size {size} = {blocks * size} entries, "
            f"fewer than index_topk {topk}: a selection would not fit into its candidates"
        )
    if source not in text.index_source_layer_ids:
        yield f"text_config.candidate_source_layer_id is {source}, must be -1 or one of index_source_layer_ids"
        return
    _, kv_sources, _ = _ordered_sources(text)
    later = [layer for layer in kv_sources if layer > source]
    if later:
        yield (
            f"text_config.kv_source_layer_ids names layer {later[0]} after the candidate source, layer {source}: "
            "candidate blocks are entries of one owner"
        )


def _sizes(text: Values, vision: Values, root: Values) -> Iterator[str]:
    heads, groups = text.num_attention_heads, text.o_groups
    if heads % groups:
        yield f"text_config.num_attention_heads is {heads}, must be a multiple of o_groups {groups}"
    chosen, experts = text.num_experts_per_tok, text.n_routed_experts
    if chosen > experts:
        yield f"text_config.num_experts_per_tok is {chosen}, must be at most n_routed_experts {experts}"


def _rope(text: Values, vision: Values, root: Values) -> Iterator[str]:
    width, limit = text.qk_rope_head_dim, min(text.head_dim, text.index_head_dim)
    if width % 2 or not 0 < width <= limit:
        yield (
            f"text_config.qk_rope_head_dim is {width}, must be even, above 0 and at most {limit} "
            "(the smaller of head_dim and index_head_dim)"
        )
    for name in ("rope_theta", "compress_rope_theta"):
        value = getattr(text, name)
        if value <= 1:
            yield f"text_config.{name} is {value}, must be above 1"
    yarn = text.rope_scaling
    if yarn.factor < 1:
        yield f"text_config.rope_scaling.factor is {yarn.factor}, must be at least 1"
    if not yarn.beta_fast > yarn.beta_slow > 0:
        yield (
            f"text_config.rope_scaling has beta_fast {yarn.beta_fast} and beta_slow {yarn.beta_slow}, "
            "must be beta_fast > beta_slow > 0"
        )
    if yarn.original_max_position_embeddings < 1:
        yield (
            "text_config.rope_scaling.original_max_position_embeddings is "
            f"{yarn.original_max_position_embeddings}, must be at least 1"
        )


def _norms(text: Values, vision: Values, root: Values) -> Iterator[str]:
    for name in ("rms_norm_eps", "hc_eps", "gate_temp"):
        value = getattr(text, name)
        if value <= 0:
            yield f"text_config.{name} is {value}, must be above 0"


def _quantizer_blocks(text: Values, vision: Values, root: Values) -> Iterator[str]:
    for name in ("hidden_size", "moe_intermediate_size", "q_lora_rank", "head_dim", "index_head_dim"):
        value = getattr(text, name)
        if value % BLOCK:
            yield f"text_config.{name} is {value}, must be a multiple of {BLOCK}, the quantizer's block"
    outputs = text.o_groups * text.o_lora_rank
    if outputs % BLOCK:
        yield f"text_config.o_groups x o_lora_rank is {outputs}, must be a multiple of {BLOCK}, the quantizer's block"


def _engram(text: Values, vision: Values, root: Values) -> Iterator[str]:
    yield from _layer_list(text, "engram_layer_ids")
    layers, rows = text.engram_layer_ids, text.engram_num_embeddings
    for index, count in enumerate(rows):
        if count < 1:
            yield f"text_config.engram_num_embeddings[{index}] is {count}, must be at least 1"
    if len(rows) != len(layers):
        yield f"text_config.engram_num_embeddings has {len(rows)} entries for {len(layers)} engram_layer_ids"
    width = text.engram_head_dim
    if width % BLOCK:
        yield f"text_config.engram_head_dim is {width}, must be a multiple of {BLOCK}, the table's block"


def _engram_primes(text: Values, vision: Values, root: Values) -> Iterator[str]:
    layers, rows = text.engram_layer_ids, text.engram_num_embeddings
    start, orders, heads = text.engram_vocab_size, text.engram_max_ngram_size - 1, text.engram_n_heads
    if start >= ENGRAM_VOCAB_LIMIT:
        yield f"text_config.engram_vocab_size is {start}, must be below {ENGRAM_VOCAB_LIMIT}: row ids are int32"
        return
    if len(rows) != len(layers):
        return
    if len(layers) * orders * heads > 100_000:
        yield f"{len(layers)} Engram layers x {orders} orders x {heads} heads is more hash columns than can be meant"
        return
    for layer, found, stated in zip(layers, engram_rows(layers, start, orders + 1, heads), rows):
        if found != stated:
            yield (
                f"text_config.engram_num_embeddings states {stated} rows for layer {layer}, the primes from "
                f"engram_vocab_size {start} add up to {found}: another prime walk would rehash the table"
            )


def _token_ids(text: Values, vision: Values, root: Values) -> Iterator[str]:
    vocab = text.vocab_size
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
        value = getattr(root, name)
        if value >= vocab:
            yield f"{name} is {value}, must be below vocab_size {vocab}"
    if text.engram_pad_token_id >= vocab:
        yield f"text_config.engram_pad_token_id is {text.engram_pad_token_id}, must be below vocab_size {vocab}"
    if text.engram_compressed_vocab_size > vocab:
        yield (
            f"text_config.engram_compressed_vocab_size is {text.engram_compressed_vocab_size}, "
            f"must be at most vocab_size {vocab}"
        )


def _draft(text: Values, vision: Values, root: Values) -> Iterator[str]:
    if text.num_nextn_predict_layers == 0:
        return
    yield from _layer_list(text, "dspark_target_layer_ids")
    if not text.dspark_target_layer_ids:
        yield "text_config.dspark_target_layer_ids is empty, but there are draft layers"
    chosen, experts = text.dspark_num_experts_per_tok, text.dspark_n_routed_experts
    if chosen > experts:
        yield f"text_config.dspark_num_experts_per_tok is {chosen}, must be at most dspark_n_routed_experts {experts}"
    if text.dspark_noise_token_id >= text.vocab_size:
        yield (
            f"text_config.dspark_noise_token_id is {text.dspark_noise_token_id}, "
            f"must be below vocab_size {text.vocab_size}"
        )


def _vision(text: Values, vision: Values, root: Values) -> Iterator[str]:
    width, heads = vision.hidden_size, vision.num_attention_heads
    if width % heads or width // heads % 4:
        yield (
            f"vision_config.hidden_size is {width}, must be num_attention_heads {heads} times a multiple of 4 "
            "(two rotary axes of pairs)"
        )
    if vision.rope_theta <= 1:
        yield f"vision_config.rope_theta is {vision.rope_theta}, must be above 1"
    ratio = vision.max_wh_ratio
    if ratio is not None and ratio < 1:
        yield f"vision_config.max_wh_ratio is {ratio}, must be null or at least 1"
    activation = vision.projector_hidden_act
    if activation not in ("gelu", "gelu_pytorch_tanh"):
        yield f"vision_config.projector_hidden_act is {activation!r}, must be 'gelu' or 'gelu_pytorch_tanh'"


RULES: tuple[Rule, ...] = (
    _fixed_values,
    _compress_ratios,
    _source_lists,
    _sources,
    _owners,
    _candidates,
    _sizes,
    _rope,
    _norms,
    _quantizer_blocks,
    _engram,
    _engram_primes,
    _token_ids,
    _draft,
    _vision,
)


def parallelism_faults(text: Any, *, model: int, experts: int = 1, shard_index_heads: bool = False) -> list[str]:
    """What forbids splitting a valid `TextConfig` over `model` chips and its experts over `experts` chips.

    Source: model specification, "Validation rules", the row on parallelism.
    """
    faults = []
    whole = {"num_attention_heads": 1, "o_groups": 1, "moe_intermediate_size": BLOCK}
    if shard_index_heads:
        whole["index_n_heads"] = 1
    for name, unit in whole.items():
        value = getattr(text, name)
        if value % model:
            faults.append(f"text_config.{name} is {value}, not divisible over {model} chips")
        elif value // model % unit:
            faults.append(
                f"text_config.{name} is {value}: {value // model} on each of {model} chips cuts a block of {unit}"
            )
    outputs = text.o_groups * text.o_lora_rank
    if text.o_groups % model == 0 and outputs // model % BLOCK:
        faults.append(
            f"o_groups x o_lora_rank is {outputs}: {outputs // model} on each of {model} chips cuts a block of {BLOCK}"
        )
    if text.n_routed_experts % experts:
        faults.append(f"text_config.n_routed_experts is {text.n_routed_experts}, not divisible over {experts} chips")
    return faults
