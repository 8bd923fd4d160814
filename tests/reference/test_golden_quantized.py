"""The reference against the golden data with activation quantization: layer by layer, and every departure traced.

One value that falls on the other side of a rounding boundary moves everything after it, so whole runs are compared
with such values named: each lies within float32 noise of a boundary, and moving it restores the recorded answer.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers import golden
from tests.helpers.rounding_flips import FLOAT32_NOISE, FlipProbe, departing_rows, explain
from tests.reference.test_golden import image_arguments

STREAMS, LOGITS = 1e-4, 1e-3

checkpoints = pytest.mark.parametrize("name", golden.CHECKPOINTS)

KNOWN_FLIPS: dict[tuple[str, int], list[tuple[str, int]]] = {
    ("pico", 4): [
        ("layers.3.ffn_input", 3639),
        ("layers.1.ffn_input", 8160),
        ("layers.8.grouped_output", 10134),
        ("layers.2.ffn_input", 10569),
    ],
    ("pico", 5): [
        ("layers.0.grouped_output", 770),
        ("layers.3.grouped_output", 3287),
        ("layers.1.attention_input", 29562),
        ("layers.2.grouped_output", 32894),
    ],
    ("five-layer", 3): [("layers.0.grouped_output", 4123)],
    ("five-layer", 5): [("layers.2.attention_input", 18786), ("layers.1.experts.5.hidden", 434)],
}
"""(checkpoint, prompt) -> site and index of the flips found there, in the order in which rows need them.

Logits cover the last 64 rows, so that the first recorded row of a long prompt may need several earlier flips; these
were found by adding, one at a time, the value within float32 noise whose flip brings the recorded rows closest.
"""


@checkpoints
def test_every_layer_from_recorded_streams(name, make_model):
    expected, model = golden.load_expected(name), make_model(name)
    recorded = expected.recorded("quant", "streams"), expected.recorded("quant", "pre_mix")
    inputs, memory = model.begin(expected.recorded("quant", "rec_prompt"))
    streams, pre_mix = model.first_streams(inputs)
    for layer in range(len(model.config.layers)):
        record = model.run_layer(layer, streams, pre_mix, inputs, memory)
        streams, pre_mix = recorded[0][layer], recorded[1][layer]
        assert np.abs(record.streams - streams).max() < STREAMS
        assert np.abs(record.pre_mix - pre_mix).max() < STREAMS
        if layer in expected.index_sources("quant"):
            topk = expected.recorded("quant", f"topk{layer}")
            assert np.array_equal(record.topk[:, : topk.shape[1]], topk)


def test_five_layer_recorded_prompt_agrees_to_the_end(make_model):
    expected = golden.load_expected("five-layer")
    output = make_model("five-layer").forward(expected.recorded("quant", "rec_prompt"))
    for record in output.layers:
        assert np.abs(record.streams - expected.recorded("quant", "streams")[record.layer]).max() < STREAMS
    hashes = np.stack([record.engram_row_ids for record in output.layers if record.engram_row_ids is not None], axis=1)
    assert np.array_equal(hashes, expected.recorded("quant", "engram_hash"))


def test_pico_recorded_prompt_departs_by_one_value_of_layer_3(make_model):
    """The first departing layer has one departing row, and one value of that layer explains all 12 layers."""
    expected, probe = golden.load_expected("pico"), FlipProbe()
    model = make_model("pico", probe=probe)
    theirs = expected.recorded("quant", "streams")

    def run() -> list[np.ndarray]:
        layers = model.forward(expected.recorded("quant", "rec_prompt")).layers
        return [departing_rows(record.streams, theirs[record.layer], STREAMS) for record in layers]

    departing = run()
    first = next(layer for layer, rows in enumerate(departing) if rows.size)
    assert first == 3 and departing[first].tolist() == [28]
    candidates = [flip for flip in probe.collect(run, FLOAT32_NOISE) if flip.site.startswith(f"layers.{first}.")]
    restoring = []
    for candidate in candidates:
        probe.flips = (candidate,)
        if not any(rows.size for rows in run()):
            restoring.append((candidate.site, candidate.index // model.config.text.hidden_size))
    assert restoring == [("layers.3.ffn_input", 28)]


@checkpoints
@pytest.mark.parametrize("prompt", golden.PROMPTS)
def test_logits_with_every_departing_row_traced_to_a_flip(name, prompt, make_model):
    expected, probe = golden.load_expected(name), FlipProbe()
    model = make_model(name, probe=probe)
    ids, theirs = expected.prompt(prompt), expected.logits("quant", prompt)
    known = KNOWN_FLIPS.get((name, prompt), [])
    flips = explain(
        probe,
        lambda stop: model.forward(ids[:stop], record=False).logits,
        theirs,
        first_row=ids.size - theirs.shape[0],
        likely=known,
        tolerance=LOGITS,
    )
    assert [(flip.site, flip.index) for flip in flips] == known


@pytest.mark.parametrize(("name", "known"), [("pico", [("layers.4.grouped_output", 4099)]), ("five-layer", [])])
def test_image_logits_with_every_departing_row_traced_to_a_flip(name, known, make_model, open_checkpoint):
    expected, probe = golden.load_expected(name), FlipProbe()
    model = make_model(name, probe=probe)
    ids, rows, embeddings = image_arguments(model, open_checkpoint(name), "quant")

    def run(stop: int) -> np.ndarray:
        kept = rows[:stop]
        return model.forward(ids[:stop], kept, embeddings[: kept.sum()] if kept.any() else None, record=False).logits

    flips = explain(probe, run, expected.recorded("quant", "image_logits"), likely=known, tolerance=LOGITS)
    assert [(flip.site, flip.index) for flip in flips] == known


def test_a_departure_that_no_near_boundary_value_explains_is_reported(make_model):
    """The tracing itself can fail: a wrong logit is not explained away."""
    expected, probe = golden.load_expected("five-layer"), FlipProbe()
    model = make_model("five-layer", probe=probe)
    wrong = expected.logits("quant", 2).copy()
    wrong[4, 100] += 0.01
    with pytest.raises(AssertionError, match="row 4 departs by 1"):
        explain(probe, lambda stop: model.forward(expected.prompt(2)[:stop], record=False).logits, wrong)
