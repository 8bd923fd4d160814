"""Layer by layer: every layer of the JAX model fed the inputs of a recording or of the float64 reference.

A quantized forward is chaotic from end to end: one value on the other side of a rounding boundary moves everything
after it. One layer at a time, a departure can only be a flip inside that layer.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from numpy.typing import NDArray

from scheduler.pools import allocate, poison
from tests.helpers import golden
from tests.helpers.models import model, reference
from v41jax.engram_hashing import history_before
from v41jax.full_forward import LoadedModel, compressed_of, engram_rows_of
from v41jax.spans import Span, batch_of
from v41jax.teacher_forcing import ForcedOutput, forced_layers

forced = jax.jit(forced_layers, static_argnames=("setup", "phase"))


def run_forced(loaded: LoadedModel, ids: NDArray, streams: NDArray, pre_mix: NDArray) -> ForcedOutput:
    """Every layer on its own input, over one private request and poisoned memory."""
    geometry = loaded.setup.geometry
    pages = geometry.pages_for(len(ids))
    compressed = compressed_of(loaded.lookup, ids, None)
    history = history_before(compressed, 0, geometry.history_size)
    batch = batch_of([Span(0, ids, compressed, 0, range(pages), history)], geometry)
    _, output = forced(
        loaded.params,
        poison(allocate(geometry, pages, 1)),
        batch,
        engram_rows_of(loaded.setup, loaded.lookup, batch),
        streams.astype(np.float32),
        pre_mix.astype(np.float32),
        setup=loaded.setup,
        phase="prefill",
    )
    return output


def relative(got: NDArray, wanted: NDArray) -> float:
    """Relative L2 distance."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("name", golden.CHECKPOINTS)
def test_quantized_layers_agree_with_the_recording(name):
    expected = golden.load_expected(name)
    loaded = model(name, quantized=True)
    ids = expected.recorded("quant", "rec_prompt")
    streams, pre_mix = (expected.recorded("quant", what) for what in ("streams", "pre_mix"))
    first = np.asarray(loaded.params.embed, np.float32)[ids]
    count = loaded.setup.config.text.hc_mult
    entering = np.concatenate([np.repeat(first[:, None], count, axis=1)[None], streams[:-1]])
    start = np.zeros_like(pre_mix[:1])
    start[..., 0] = 1
    output = run_forced(loaded, ids, entering, np.concatenate([start, pre_mix[:-1]]))
    departed = np.abs(np.asarray(output.streams) - streams).max(axis=(2, 3)) > 1e-4
    assert {layer: np.flatnonzero(rows).tolist() for layer, rows in enumerate(departed) if rows.any()} == {}
    assert np.abs(np.asarray(output.pre_mix) - pre_mix).max() < 1e-4
    for layer, selection in output.selections:
        wanted = expected.recorded("quant", f"topk{layer}")
        assert np.array_equal(np.asarray(selection.entries)[:, : wanted.shape[1]], wanted), f"layer {layer}"


@functools.cache
def reference_run(name: str, dtype: str, quantized: bool, index_format: str = "fp4"):
    """Ids and recorded reference layers of a prompt long enough for every selection to be a choice."""
    random = np.random.default_rng(5)
    config = reference(name, dtype, quantized, index_format).config
    ids = random.integers(0, config.text.vocab_size, 60).astype(np.int32)
    ids = np.where(ids == config.image_token_id, 0, ids).astype(np.int32)
    return ids, reference(name, dtype, quantized, index_format).forward(ids).layers


@pytest.mark.parametrize(
    ("name", "index_format"), [("pico", "fp4"), ("five-layer", "fp8")], ids=["released arithmetic", "FP8 index plane"]
)
def test_bfloat16_layers_agree_with_the_reference(name, index_format):
    loaded = model(name, "bfloat16", True, index_format=index_format)
    ids, layers = reference_run(name, "bfloat16", True, index_format)
    streams = np.stack([layer.input_streams for layer in layers])
    pre_mix = np.stack([layer.input_pre_mix for layer in layers])
    output = run_forced(loaded, ids, streams, pre_mix)
    distances = [relative(output.streams[index], layer.streams) for index, layer in enumerate(layers)]
    assert max(distances) < 5e-3, distances
    for index, layer in enumerate(layers):
        assert relative(output.pre_mix[index], layer.pre_mix) < 5e-3
    # Most rows have no value near a rounding boundary and must agree in every bit the reference rounds to.
    same = [
        np.mean(np.all(np.asarray(output.streams[index], np.float64) == layer.streams, axis=(1, 2)))
        for index, layer in enumerate(layers)
    ]
    assert np.mean(same) > 0.8, same
    for layer, selection in output.selections:
        assert np.array_equal(np.asarray(selection.entries), layers[layer].topk), f"layer {layer}"
