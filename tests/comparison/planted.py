"""Ten faults of the kinds that ports of this model have had, each planted in the running layers or in their weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantized_rows import xla as rows
from v41jax.comparison.jax_subject import JaxSubject
from v41jax.layers import attention, compressor, hyper_connections, indexer

Plant = Callable[[pytest.MonkeyPatch, JaxSubject], None]


def _replace(patch: pytest.MonkeyPatch, module: Any, name: str, make: Callable[[Any], Any]) -> None:
    patch.setattr(module, name, make(getattr(module, name)))


def transposed_mix(patch, subject):
    def make(function):
        def call(*args, **kwargs):
            pre, post, combination = function(*args, **kwargs)
            return pre, post, combination.swapaxes(-1, -2)

        return call

    _replace(patch, hyper_connections, "stream_mixes", make)


def window_of_one_more(patch, subject):
    def make(function):
        return lambda *args, **kwargs: function(*args, **{**kwargs, "window": kwargs["window"] + 1})

    _replace(patch, attention, "sparse_attention", make)


def stale_index_key(patch, subject):
    """Every page row gets the key of the entry before it."""

    def make(function):
        return lambda key, *args: function(jnp.concatenate([key[:1], key[:-1]]), *args)

    _replace(patch, compressor, "encode_index_key", make)


def high_nibble_first(patch, subject):
    def swapped(weight):
        return weight._replace(values=(weight.values << 4) | (weight.values >> 4))

    def change(layer):
        experts = layer.moe.experts
        return layer._replace(moe=layer.moe._replace(experts=experts._replace(w2=swapped(experts.w2))))

    _change_weights(patch, subject, change)


def large_epsilon(patch, subject):
    """In the norms of the attention sublayer's latents."""

    def make(function):
        return lambda x, weight, epsilon: function(x, weight, 1e-4)

    _replace(patch, attention, "rms_norm", make)


def larger_id_wins_ties(patch, subject):
    def make(function):
        def call(scores, visible, k, **kwargs):
            if kwargs.get("candidates") is not None:
                return function(scores, visible, k, **kwargs)
            order = np.asarray(scores)[:, ::-1]
            best = np.argsort(-order, axis=1, kind="stable")[:, :k]
            chosen = scores.shape[1] - 1 - best
            seen = np.take_along_axis(np.asarray(scores), chosen, axis=1) > -np.inf
            ids = np.sort(np.where(seen, chosen, scores.shape[1]), axis=1)
            entries = np.full((len(ids), k), -1, np.int32)
            entries[:, : ids.shape[1]] = np.where(ids < scores.shape[1], ids, -1)
            return jnp.asarray(entries), jnp.asarray((entries >= 0).sum(axis=1), jnp.int32)

        return call

    _replace(patch, indexer, "select_topk", make)


def rotated_at_the_last_token(patch, subject):
    def make(function):
        return lambda table, positions: function(table, positions + 1)

    _replace(patch, compressor, "at_positions", make)


def missing_clamp(patch, subject):
    def make(function):
        return lambda gate, up, limit: function(gate, up, 0.0)

    _replace(patch, rows, "swiglu", make)


def swapped_hash_columns(patch, subject):
    hasher = subject.loaded.lookup.hasher
    original = hasher.batch_row_ids

    def call(*args):
        ids = np.array(original(*args))
        ids[..., [0, 1]] = ids[..., [1, 0]]
        return ids

    patch.setattr(hasher, "batch_row_ids", call)


def scales_along_the_wrong_axis(patch, subject):
    """The block scales of `wq_b`, laid out column by column; those of smaller matrices are all equal here."""

    def change(layer):
        wq_b = layer.attention.wq_b
        scales = wq_b.scales.swapaxes(-1, -2).reshape(wq_b.scales.shape)
        assert (scales != wq_b.scales).any()
        return layer._replace(attention=layer.attention._replace(wq_b=wq_b._replace(scales=scales)))

    _change_weights(patch, subject, change)


def _change_weights(patch: pytest.MonkeyPatch, subject: JaxSubject, change: Callable[[Any], Any]) -> None:
    params = subject.loaded.params
    patch.setattr(
        subject,
        "loaded",
        dataclasses.replace(subject.loaded, params=params._replace(runs=tuple(change(run) for run in params.runs))),
    )


FAULTS: dict[str, tuple[Plant, int, str]] = {
    "a transposed mHC matrix": (transposed_mix, 0, "attention_combination"),
    "an off-by-one window": (window_of_one_more, 0, "attended"),
    "a stale index key": (stale_index_key, 2, "index_keys"),
    "a wrong nibble order": (high_nibble_first, 0, "routed_output"),
    "an eps": (large_epsilon, 0, "window_kv"),
    "a tie rule": (larger_id_wins_ties, 2, "topk"),
    "a rope position": (rotated_at_the_last_token, 2, "compressed_kv"),
    "a missing clamp": (missing_clamp, 0, "shared_hidden"),
    "a hash column": (swapped_hash_columns, 1, "engram_row_ids"),
    "a scale axis": (scales_along_the_wrong_axis, 0, "query"),
}
"""Name -> how it is planted, and the layer and operation that must be found."""
