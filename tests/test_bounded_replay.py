"""Which rows run which layer under decoder replay, on forwards small enough to say what must come out."""

import numpy as np

from scheduler.pools import allocate, poison
from tests.helpers import models
from v41jax.engram_hashing import history_before
from v41jax.full_forward import compressed_of, engram_rows_of, step
from v41jax.spans import Span, batch_of

LENGTHS = (8, 5, 3)


def spans_of(model, finals):
    """One cold request of each of `LENGTHS`, none longer than a window."""
    spans = []
    random = np.random.default_rng(3)
    for slot, (length, final) in enumerate(zip(LENGTHS, finals)):
        ids = random.integers(3, model.setup.config.text.vocab_size, length).astype(np.int32)
        compressed = compressed_of(model.lookup, ids, None)
        history = history_before(compressed, 0, model.setup.geometry.history_size)
        spans.append(Span(0, ids, compressed, 2 - slot, [slot], history, is_final=final))
    return spans


def run(model, spans, pools=None, **options):
    batch = batch_of(spans, model.setup.geometry, rows=32, requests=4, columns=4, **options)
    pools = poison(allocate(model.setup.geometry, 4, 3)) if pools is None else pools
    rows = engram_rows_of(model.setup, model.lookup, batch)
    return step(model.params, pools, batch, rows, setup=model.setup, phase="prefill")


def test_a_prompt_within_one_window_loses_nothing():
    """Its tail is the whole prompt, so logits, pages and rings are those of the full forward."""
    model = models.model("five-layer")
    spans = spans_of(model, (True, True, True))
    pools, output = run(model, spans, output_rows=[7, 12, 15], outputs=4)
    replayed_pools, replayed = run(model, spans, outputs=4, decoder_replay=True)
    np.testing.assert_allclose(replayed.logits[:3], output.logits[:3], atol=1e-5)
    np.testing.assert_allclose(replayed_pools.window, pools.window, atol=1e-5)
    for ours, full in zip(replayed_pools.main, pools.main):
        np.testing.assert_allclose(ours, full, atol=1e-5)


def test_requests_that_do_not_finish_leave_the_decoder_rings_as_reset():
    model = models.model("five-layer")
    owner = model.setup.geometry.owners[-1][0]
    pools, _ = run(model, spans_of(model, (True, False, True)), outputs=4, decoder_replay=True)
    rings = np.asarray(pools.window)
    assert (rings[owner:, 1] == 0).all()
    assert (rings[:owner, 1, :5] != 0).any(axis=-1).all()
    for slot, length in ((2, 8), (0, 3)):
        assert (rings[owner:, slot, :length] != 0).any(axis=-1).all()
    full, _ = run(model, spans_of(model, (True, False, True)))
    for ours, theirs in zip(pools.main, full.main):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_a_forward_without_a_finishing_request_has_no_decoder():
    model = models.model("five-layer")
    owner = model.setup.geometry.owners[-1][0]
    pools, output = run(model, spans_of(model, (False,) * 3), decoder_replay=True)
    assert output.logits.shape == (0, model.setup.config.text.vocab_size)
    assert (np.asarray(pools.window)[owner:] == 0).all()
