"""The training forwards on the weights they export: reference, runtime, draft reference, cached generation."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.load import Checkpoint
from checkpoints.verify import verify
from tests.training.conftest import Toy
from training.backbone import Setup, backbone, head, released_narrowing, whole
from training.draft import context_keys, draft
from training.generation import generate
from training.hashing import row_ids
from training.weights import serving_weights
from v41jax.engram_hashing import EngramHasher, history_before
from v41jax.full_forward import full_forward, load_model
from v41jax.precision import Precision
from v41jax.reference import ReferenceModel
from v41jax.reference.dspark import ReferenceDraft

EXACT = Precision(activation_dtype=jnp.float32, activation_quantization=False)
QUANTIZED = Precision(activation_dtype=jnp.float32, activation_quantization=True)


def forward(toy: Toy, precision: Precision):
    setup = Setup(toy.config, precision, index_loss=False)
    weights = serving_weights(toy.masters, toy.config, ("text", "draft"), precision.activation_dtype)

    @jax.jit
    def run(weights, ids):
        cuts = whole(ids.shape[0])
        narrowing = released_narrowing(toy.config)
        output = backbone(weights, toy.tables, toy.plain, toy.yarn, ids, narrowing, cuts, 0, setup=setup)
        return head(weights, output.hidden), output.features

    return weights, run(weights, jnp.asarray(toy.token_ids))


def nats(logits: np.ndarray, ids: np.ndarray) -> float:
    logits = np.asarray(logits, np.float64)[:-1]
    peak = logits.max(axis=1, keepdims=True)
    normalizer = np.log(np.exp(logits - peak).sum(axis=1)) + peak[:, 0]
    return float((normalizer - logits[np.arange(len(ids) - 1), ids[1:]]).mean())


def test_an_export_passes_verification(toy: Toy) -> None:
    assert verify(toy.directory).faults == ()


def test_row_ids_are_those_of_the_host(toy: Toy) -> None:
    hasher = EngramHasher(toy.config, toy.token_map)
    for ids in toy.token_ids:
        compressed = hasher.compress(ids)
        expected = hasher.row_ids(np.concatenate([history_before(compressed, 0, hasher.history_size), compressed]))
        for ordinal in range(expected.shape[1]):
            np.testing.assert_array_equal(row_ids(toy.tables, jnp.asarray(ids[None]), ordinal)[0], expected[:, ordinal])


def test_logits_and_drafts_are_those_of_the_reference_and_the_runtime(toy: Toy) -> None:
    weights, (logits, features) = forward(toy, EXACT)
    ids = toy.token_ids[1]
    with Checkpoint.open(toy.directory, scopes=("text", "draft")) as checkpoint:
        reference_draft = ReferenceDraft(checkpoint, activation_quantization=False)
        with ReferenceModel(checkpoint, activation_quantization=False) as reference:
            expected = reference.forward(ids)
        assert toy.config.text.index_topk < expected.layers[4].index_scores.shape[1] // 2
        np.testing.assert_allclose(logits[1], expected.logits, atol=2e-5)
        with load_model(toy.directory, EXACT, max_model_len=len(ids)) as model:
            served = full_forward(model.params, ids, model.setup, model.lookup)
        np.testing.assert_allclose(logits[1], served, atol=2e-5)

        setup = Setup(toy.config, EXACT, index_loss=False)
        anchors = jnp.array([[1, 7, 40], [3, 20, 50]], jnp.int32)
        tokens = jnp.asarray(toy.token_ids)

        @jax.jit
        def drafted(weights, features):
            keys = context_keys(weights, features, toy.plain, setup=setup)
            return draft(weights, keys, tokens, anchors, toy.plain, setup=setup)

        blocks = drafted(weights, features)
        context = reference_draft.context_keys(reference_draft.features(expected.layers), np.arange(len(ids)))
        for number, anchor in enumerate((3, 20, 50)):
            block = reference_draft.draft(int(ids[anchor]), anchor - 1, context[:, :anchor])
            given = 3 + number
            np.testing.assert_allclose(blocks.logits[given, 0], block.logits[0], atol=2e-5)
            markov = np.asarray(weights["mtp.2.markov_head.embed.weight"], np.float64)
            out = np.asarray(weights["mtp.2.markov_head.head.weight"], np.float64)
            after = ids[anchor : anchor + block.base_logits.shape[0]]
            np.testing.assert_allclose(blocks.logits[given], block.base_logits + markov[after] @ out.T, atol=2e-5)
            np.testing.assert_allclose(blocks.confidence[given, 0], block.confidence[0], atol=2e-5)


def test_quantized_forwards_agree_on_what_the_text_costs(toy: Toy) -> None:
    _, (logits, _) = forward(toy, QUANTIZED)
    ids = toy.token_ids[0]
    with Checkpoint.open(toy.directory) as checkpoint, ReferenceModel(checkpoint) as reference:
        expected = reference.forward(ids, record=False).logits
    # A value on a rounding boundary may fall to either side, and a selection may follow it.
    assert nats(logits[0], ids) == pytest.approx(nats(expected, ids), abs=5e-3)
    assert np.median(np.abs(np.asarray(logits[0]) - expected)) < 5e-3


def test_generation_with_caches_is_greedy_decoding(toy: Toy) -> None:
    setup = Setup(toy.config, EXACT, index_loss=False)
    weights = serving_weights(toy.masters, toy.config, ("text", "draft"), EXACT.activation_dtype)
    prompts = jnp.asarray(toy.token_ids[:, :5])
    length = toy.token_ids.shape[1]
    made = jax.jit(lambda weights: generate(weights, toy.tables, toy.plain, toy.yarn, prompts, length, setup=setup))(
        weights
    )
    again = dataclasses.replace(toy, token_ids=np.asarray(made))
    _, (logits, _) = forward(again, EXACT)
    np.testing.assert_array_equal(made[:, :5], prompts)
    np.testing.assert_array_equal(np.argmax(logits, axis=-1)[:, 4:-1], made[:, 5:])
