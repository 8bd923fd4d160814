"""The reference against the golden data, without activation quantization: everything, end to end."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers import golden
from v41jax.reference import ReferenceModel

LOGITS, STREAMS, PRE_MIX = 2e-5, 3e-5, 3e-6
"""Absolute bounds. The logits' spread is 2.0; float32 noise of the recorded side is what remains."""

checkpoints = pytest.mark.parametrize("name", golden.CHECKPOINTS)


def image_arguments(model: ReferenceModel, checkpoint, mode: str) -> tuple:
    """Arguments of `forward` for the golden image prompt."""
    expected = golden.load_expected(checkpoint.directory.name)
    ids, rows = golden.image_span(expected, model.config.image_token_id)
    delimiters = [checkpoint.tensor(f"image_{part}").astype(np.float64) for part in ("start", "newline", "end")]
    patches = expected.recorded(mode, "image_embeds")
    return ids, rows, golden.span_embeddings(expected["image.types"], patches, *delimiters)


@checkpoints
@pytest.mark.parametrize("prompt", golden.PROMPTS)
def test_logits(name, prompt, make_model):
    expected = golden.load_expected(name)
    output = make_model(name, activation_quantization=False).forward(expected.prompt(prompt), record=False)
    theirs = expected.logits("noquant", prompt)
    assert np.abs(output.logits[-golden.LOGIT_ROWS :] - theirs).max() < LOGITS


@checkpoints
def test_streams_hashes_and_selections_of_the_recorded_prompt(name, make_model):
    expected = golden.load_expected(name)
    output = make_model(name, activation_quantization=False).forward(expected.recorded("noquant", "rec_prompt"))
    streams, pre_mix = expected.recorded("noquant", "streams"), expected.recorded("noquant", "pre_mix")
    assert len(output.layers) == len(streams)
    for record in output.layers:
        assert np.abs(record.streams - streams[record.layer]).max() < STREAMS
        assert np.abs(record.pre_mix - pre_mix[record.layer]).max() < PRE_MIX
    hashes = np.stack([record.engram_row_ids for record in output.layers if record.engram_row_ids is not None], axis=1)
    assert np.array_equal(hashes, expected.recorded("noquant", "engram_hash"))
    for source in expected.index_sources("noquant"):
        topk = expected.recorded("noquant", f"topk{source}")
        assert np.array_equal(output.layers[source].topk[:, : topk.shape[1]], topk)
        assert (output.layers[source].topk[:, topk.shape[1] :] == -1).all()


@checkpoints
def test_image_logits(name, make_model, open_checkpoint):
    expected, model = golden.load_expected(name), make_model(name, activation_quantization=False)
    output = model.forward(*image_arguments(model, open_checkpoint(name), "noquant"), record=False)
    assert np.abs(output.logits - expected.recorded("noquant", "image_logits")).max() < LOGITS


@pytest.mark.parametrize("ignored", ["router bias", "dead n-grams"])
def test_image_rows_matter_beyond_their_embeddings(ignored, make_model, open_checkpoint, monkeypatch):
    """The image comparison would notice a text bias, or n-grams that span the image."""
    expected, model = golden.load_expected("pico"), make_model("pico", activation_quantization=False)
    arguments = image_arguments(model, open_checkpoint("pico"), "noquant")
    if ignored == "router bias":
        held = model._weights
        plain = held.plain
        monkeypatch.setattr(held, "plain", lambda key: plain(key.replace("bias_vl", "bias")))
    else:
        hasher = model._hasher
        compress = hasher.compress
        monkeypatch.setattr(hasher, "compress", lambda ids, dead_mask: compress(ids))
    output = model.forward(*arguments, record=False)
    assert np.abs(output.logits - expected.recorded("noquant", "image_logits")).max() > 1e-2
