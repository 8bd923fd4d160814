"""Recording the intermediates of the JAX layers while they run, without a second forward.

The layers are plain functions that call each other by name through their modules. While `watching` is open those names
stand for wrappers that call the function and keep what it took or gave; the layer code runs as it is, and nothing of
this is there when serving. Layers must run outside `jit`: what is traced is not kept.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from pallas_kernels.rotation import rotate
from v41jax import attention_sublayer, model
from v41jax.config import CandidateRole
from v41jax.layers import attention, compressor, engram, indexer, moe

Notes = dict[str, NDArray]

Take = Callable[[int, tuple[Any, ...], dict[str, Any], Any], dict[str, Any]]
"""(number of the call within the layer, arguments, keyword arguments, result) -> tensors by name."""


class Tap(NamedTuple):
    """A function that is watched under the name by which its caller knows it."""

    module: ModuleType
    name: str
    take: Take


def _result(name: str) -> Take:
    return lambda call, args, kwargs, result: {name: result}


def _rounded(name: str) -> Take:
    return lambda call, args, kwargs, result: {name: result.rounded}


def _argument(position: int, name: str) -> Take:
    return lambda call, args, kwargs, result: {name: args[position]}


def _mixes(call: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> dict[str, Any]:
    if call:
        return {"pre_mix": result.pre, "ffn_post": result.post, "ffn_combination": result.combination}
    names = ("attention_pre_mix", "attention_post", "attention_combination")
    return dict(zip(names, (result.pre, result.post, result.combination)))


def _expand(call: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> dict[str, Any]:
    return {"streams" if call else "attention_streams": result}


def _select(call: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> dict[str, Any]:
    selection, candidates = result
    taken = {"own_topk": selection.entries}
    return taken | ({"candidate_blocks": candidates} if kwargs["role"] is CandidateRole.PUBLISHES else {})


def _candidate_scores(call: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> dict[str, Any]:
    return {"candidate_scores": result, "candidates_given": args[7]}


def _attend(call: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> dict[str, Any]:
    return {"window_rows": args[1], "topk": args[5].selection.entries, "attention_output": result}


def _sparse_attention(call: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> dict[str, Any]:
    return {"query": rotate(args[0], *args[14:16]) if kwargs["rotate_query"] else args[0], "attended": result}


def _router(call: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> dict[str, Any]:
    return {"router_choices": result.experts, "router_weights": result.weights}


def _moe(call: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> dict[str, Any]:
    return {"ffn_input": args[0].rounded, "ffn_output": result[0]}


TAPS: tuple[Tap, ...] = (
    Tap(engram, "gates", _result("engram_gates")),
    Tap(model, "engram_update", lambda call, args, kwargs, result: {"mixed_streams": result.streams}),
    Tap(model, "attention_input", _rounded("attention_input")),
    Tap(compressor, "encode_main", _argument(0, "compressed_kv")),
    Tap(compressor, "encode_index_key", _argument(0, "index_key")),
    Tap(model, "window_rows", _result("window_kv")),
    Tap(model, "mixes", _mixes),
    Tap(attention_sublayer, "query_latent", _rounded("low_rank_query")),
    Tap(
        attention_sublayer,
        "index_queries",
        lambda call, args, kwargs, result: {"index_query": result[0], "index_head_weights": result[1]},
    ),
    Tap(indexer, "index_scores", _result("index_scores")),
    Tap(indexer, "candidate_scores", _candidate_scores),
    Tap(attention_sublayer, "select", _select),
    Tap(attention, "sparse_attention", _sparse_attention),
    Tap(attention, "summed_rows", _rounded("grouped_output")),
    Tap(attention_sublayer, "attend", _attend),
    Tap(model, "expand", _expand),
    Tap(moe, "router_logits", _result("router_logits")),
    Tap(moe, "route", _router),
    Tap(moe, "grouped_experts", _result("routed_output")),
    Tap(moe, "gated_rows", _rounded("shared_hidden")),
    Tap(moe, "shared_expert", _result("shared_output")),
    Tap(model, "moe", _moe),
)


@contextlib.contextmanager
def watching() -> Iterator[Notes]:
    """Keeps the tensors of the one layer that runs inside, as NumPy arrays by name.

    Not for two threads at once: the wrappers are seen by the whole process.
    """
    notes: dict[str, Any] = {}

    def watched(tap: Tap, function: Callable[..., Any]) -> Callable[..., Any]:
        calls = 0

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            result = function(*args, **kwargs)
            for name, value in tap.take(calls, args, kwargs, result).items():
                if not isinstance(value, jax.core.Tracer):
                    notes[name] = value
            calls += 1
            return result

        return wrapper

    originals = [(tap, getattr(tap.module, tap.name)) for tap in TAPS]
    try:
        for tap, function in originals:
            setattr(tap.module, tap.name, watched(tap, function))
        yield notes
    finally:
        for tap, function in originals:
            setattr(tap.module, tap.name, function)
    for name, value in notes.items():
        array = np.asarray(value)
        notes[name] = array if array.dtype.kind in "iufb" else array.astype(np.float32)
