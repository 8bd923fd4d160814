"""The draft of a model whose every size differs from the release's, with weights kept in their stored codes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.load import Checkpoint
from checkpoints.synthesize import synthesize
from scheduler.pools import allocate, poison
from v41jax.draft_parameters import load_draft_parameters
from v41jax.dspark import DraftRequests, check_draft, draft_block, write_draft_context
from v41jax.full_forward import geometry_of
from v41jax.layers.rows import prepare_rows
from v41jax.model import ModelSetup, Taps
from v41jax.parameters import load_parameters
from v41jax.precision import Precision
from v41jax.presets import preset
from v41jax.reference.dspark import ReferenceDraft
from v41jax.spans import Span, batch_of

LENGTHS = (4, 33)
"""Processed positions of two requests: the window is 11, the ring 15."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("odd") / "checkpoint"
    synthesize(directory, preset("odd"), seed=5, scopes=("text", "draft"))
    with Checkpoint.open(directory, scopes=("text", "draft")) as opened:
        yield opened


def test_blocks_are_the_references(checkpoint):
    config = checkpoint.config
    text = config.text
    precision = Precision(jnp.dtype("float32"), False)
    setup = ModelSetup(config, geometry_of(config, precision, speculative_tokens=text.dspark_block_size), precision)
    check_draft(setup)
    assert setup.geometry.window_layers == text.num_hidden_layers + 2
    params = load_parameters(checkpoint, max_model_len=64, form="stored", dtype="float32")
    draft = load_draft_parameters(checkpoint, form="stored", dtype="float32")
    reference = ReferenceDraft(checkpoint, activation_quantization=False)

    rng = np.random.default_rng(3)
    width = len(text.dspark_target_layer_ids) * text.hidden_size
    features = [rng.normal(size=(length, width)).astype(np.float32) for length in LENGTHS]
    contexts = [reference.context_keys(taps.astype(np.float64), np.arange(len(taps))) for taps in features]
    anchors = rng.integers(3, text.vocab_size, len(LENGTHS))
    expected = [reference.draft(int(a), n - 1, c) for a, n, c in zip(anchors, LENGTHS, contexts)]

    slots = (2, 0)
    spans = [
        Span(
            start=0,
            token_ids=np.zeros(length, np.int32),
            compressed_ids=np.zeros(length, np.int32),
            slot=slot,
            pages=range(setup.geometry.pages_for(length)),
            history=np.zeros(setup.geometry.history_size, np.int32),
        )
        for length, slot in zip(LENGTHS, slots)
    ]
    batch = batch_of(spans, setup.geometry, rows=48, requests=3)
    padded = np.full((48, width), np.nan, np.float32)
    padded[: sum(LENGTHS)] = np.concatenate(features)

    @jax.jit
    def run(params, draft, pools, batch, features, requests):
        rows = prepare_rows(batch, params.plain, params.yarn, ring=setup.geometry.ring, phase="prefill")
        pools = write_draft_context(draft, pools, Taps(features, rows), batch.slots, setup=setup)
        return pools.window, draft_block(params, draft, pools, requests, setup=setup)

    requests = DraftRequests(
        anchors=np.array([*anchors, 0], np.int32),
        positions=np.array([*(length - 1 for length in LENGTHS), 0], np.int32),
        slots=batch.slots,
        live=np.array([True, True, False]),
    )
    pools = poison(allocate(setup.geometry, 1, 4))
    window, block = jax.tree.map(np.asarray, run(params, draft, pools, batch, padded, requests))
    for index, (length, slot) in enumerate(zip(LENGTHS, slots)):
        kept = np.arange(max(0, length - setup.geometry.ring), length)
        rings = window[setup.geometry.layers :, slot]
        np.testing.assert_allclose(rings[:, kept % setup.geometry.ring], contexts[index][:, kept], rtol=0, atol=1e-4)
        assert block.tokens[index].tolist() == expected[index].proposals.tolist()
        np.testing.assert_allclose(block.confidence[index], expected[index].confidence, rtol=0, atol=1e-4)
    # The backbone's rings, other slots and padding are untouched.
    assert np.isnan(window[: setup.geometry.layers]).all() and np.isnan(window[:, [1, 3]]).all()
    assert not block.tokens[2].any() and block.tokens.shape == (3, 4)
