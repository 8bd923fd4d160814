"""The JAX model against the independent implementation's answers, float32 activations, no activation quantization."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers import golden
from tests.helpers.batches import Driver
from tests.helpers.models import model

LOGIT_LIMIT = 1e-3
STREAM_LIMIT = 1e-4


@pytest.fixture(scope="module", params=golden.CHECKPOINTS)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def driver(name) -> Driver:
    return Driver(model(name))


@pytest.mark.parametrize("prompt", golden.PROMPTS)
def test_logits_of_every_prompt_agree(name, driver, prompt):
    expected = golden.load_expected(name)
    wanted = expected.logits("noquant", prompt)
    logits = driver.logits(expected.prompt(prompt), [64])
    assert np.abs(logits[-len(wanted) :] - wanted).max() < LOGIT_LIMIT


def test_recorded_intermediates_agree(name, driver):
    expected = golden.load_expected(name)
    ids = expected.recorded("noquant", "rec_prompt")
    driver.logits(ids, [64])
    record = driver.records[-1]
    rows = slice(0, len(ids))
    streams, pre_mix = (expected.recorded("noquant", what) for what in ("streams", "pre_mix"))
    assert np.abs(np.asarray(record.layers.streams)[:, rows] - streams).max() < STREAM_LIMIT
    assert np.abs(np.asarray(record.layers.pre_mix)[:, rows] - pre_mix).max() < STREAM_LIMIT
    sources = tuple(layer for layer, _ in record.selections)
    assert sources == expected.index_sources("noquant")
    for layer, selection in record.selections:
        wanted = expected.recorded("noquant", f"topk{layer}")
        entries = np.asarray(selection.entries)[rows]
        assert np.array_equal(entries[:, : wanted.shape[1]], wanted), f"layer {layer}"
        assert (entries[:, wanted.shape[1] :] == -1).all()
        assert np.array_equal(np.asarray(selection.counts)[rows], (wanted >= 0).sum(axis=1))


def test_engram_rows_are_the_recorded_ones(name):
    expected = golden.load_expected(name)
    hasher = model(name).lookup.hasher
    ids = expected.recorded("noquant", "rec_prompt")
    history = np.full(hasher.history_size, -1, np.int32)
    rows = hasher.row_ids(np.concatenate([history, hasher.compress(ids)]))
    assert np.array_equal(rows, expected.recorded("noquant", "engram_hash"))


@pytest.mark.parametrize("chunks", [[64], [17, 9, 1, 64]], ids=["whole", "inside the span"])
def test_image_prompt_agrees(name, driver, chunks):
    expected = golden.load_expected(name)
    loaded = model(name)
    ids, rows = golden.image_span(expected, loaded.setup.config.image_token_id)
    embeddings = image_embeddings(name)
    logits = driver.logits(ids, chunks, image_rows=rows, image_embeddings=embeddings)
    assert np.abs(logits - expected.recorded("noquant", "image_logits")).max() < LOGIT_LIMIT


def test_the_image_rows_matter(name, driver):
    """The same embeddings without the span's own router bias and dead Engram rows give other logits."""
    expected = golden.load_expected(name)
    ids, rows = golden.image_span(expected, model(name).setup.config.image_token_id)
    wrong = driver.logits(ids, [64])
    assert np.abs(wrong - expected.recorded("noquant", "image_logits"))[rows].max() > 100 * LOGIT_LIMIT


def image_embeddings(name: str) -> np.ndarray:
    """The span's embeddings from the recorded aligner rows and the checkpoint's delimiters."""
    from checkpoints.load import Checkpoint

    expected = golden.load_expected(name)
    with Checkpoint.open(golden.directory(name), scopes=("vision",)) as checkpoint:
        delimiters = [np.array(checkpoint.tensor(f"image_{part}"), np.float32) for part in ("start", "newline", "end")]
    return golden.span_embeddings(expected["image.types"], expected.recorded("noquant", "image_embeds"), *delimiters)
