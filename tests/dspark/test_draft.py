"""The draft against the float64 reference, and what a block may and may not see."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sparse_attention import sparse_attention
from pallas_kernels.stored_rows import store_rows
from tests.dspark import driver
from tests.dspark.driver import Driver
from v41jax.config import ModelConfig
from v41jax.draft_parameters import DraftParameters
from v41jax.dspark import DraftRequests, block_rows, check_draft, draft_stage, pick
from v41jax.full_forward import geometry_of
from v41jax.layers.attention import write_ring
from v41jax.layers.linear import LinearWeight
from v41jax.layers.rope import RopeTable, at_positions
from v41jax.layers.rows import prepare_rows
from v41jax.model import ModelSetup
from v41jax.parameters import Parameters
from v41jax.precision import Precision
from v41jax.presets import preset, preset_dict
from v41jax.reference import ReferenceModel
from v41jax.reference.dspark import ReferenceDraft
from v41jax.sampling import SamplingInputs, sample
from v41jax.spans import Span, batch_of

LENGTHS = (1, 7, 20, 45)
"""Prompts below the window (8), below the ring (13), above it, and longer than one prefill (32 rows)."""


def prompts():
    rng = np.random.default_rng(11)
    return [rng.integers(3, 500, length) for length in LENGTHS]


@pytest.fixture(scope="module")
def reference():
    with ReferenceModel(driver.open_checkpoint(), activation_quantization=False) as model:
        yield model, ReferenceDraft(driver.open_checkpoint(), activation_quantization=False)


@pytest.fixture(scope="module")
def expected(reference):
    """Per prompt: the anchor, the context keys and the reference's block."""
    model, draft = reference
    result = []
    for prompt in prompts():
        output = model.forward(prompt)
        context = draft.context_keys(draft.features(output.layers), np.arange(prompt.size))
        anchor = int(np.argmax(output.logits[-1]))
        result.append((anchor, context, draft.draft(anchor, prompt.size - 1, context)))
    return result


@pytest.fixture(scope="module")
def run():
    run = Driver(*driver.load())
    for slot, prompt in enumerate(prompts()):
        run.prefill(slot, prompt)
    return run


def test_context_windows_hold_the_references_keys(run, expected):
    geometry = run.geometry
    rings = np.asarray(run.pools.window)[geometry.layers :]
    for slot, (_, context, _) in enumerate(expected):
        end = context.shape[1]
        kept = np.arange(max(0, end - geometry.window_size), end)
        np.testing.assert_allclose(rings[:, slot, kept % geometry.ring], context[:, kept], rtol=0, atol=1e-4)


@pytest.mark.parametrize("slots", [[0, 1, 2], [3], [2, 3]])
def test_proposals_and_confidences_are_the_references(run, expected, slots):
    block = run.draft(slots)
    for index, slot in enumerate(slots):
        anchor, _, record = expected[slot]
        assert run.anchors[slot] == anchor
        assert block.tokens[index].tolist() == record.proposals.tolist()
        np.testing.assert_allclose(block.confidence[index], record.confidence, rtol=0, atol=1e-4)
    assert not block.tokens[len(slots) :].any() and not block.confidence[len(slots) :].any()


def test_the_confidence_head_changes_no_proposal(run):
    assert run.draft([1, 2, 3], confidence=False).confidence is None
    assert np.array_equal(run.draft([1, 2, 3], confidence=False).tokens, run.draft([1, 2, 3]).tokens)


def test_drafting_changes_nothing_and_only_reads_its_own_slots(run):
    before = jax.tree.map(np.asarray, run.pools)
    tokens = run.draft([1, 3]).tokens
    for ours, theirs in zip(jax.tree.leaves(before), jax.tree.leaves(run.pools)):
        assert np.asarray(theirs).tobytes() == ours.tobytes()
    kept = run.pools
    geometry = run.geometry
    # Every ring row that neither block may read becomes NaN, as do the backbone's windows and all pages.
    readable = np.zeros(kept.window.shape[:3], bool)
    for slot in (1, 3):
        end = len(run.tokens[slot])
        readable[geometry.layers :, slot, np.arange(max(0, end - geometry.window_size), end) % geometry.ring] = True
    nothing = jax.tree.map(lambda array: jnp.full_like(array, jnp.nan), (kept.main, kept.tail_kv, kept.tail_score))
    run.pools = kept.replace(
        window=jnp.where(readable[..., None], kept.window, jnp.nan),
        main=nothing[0],
        tail_kv=nothing[1],
        tail_score=nothing[2],
    )
    assert np.array_equal(run.draft([1, 3]).tokens, tokens)
    run.pools = kept


def test_drawn_proposals_use_the_noise_of_their_verification(run):
    seeds = np.array([5, 6, 7], np.uint32)
    positions = np.array([len(run.tokens[slot]) + 1 for slot in (1, 2, 3)], np.int32)
    ones = np.ones(3, np.float32)
    inputs = SamplingInputs(3 * ones, np.zeros(3, np.int32), ones, 0 * ones, seeds, positions)
    drawn = run.draft([1, 2, 3], inputs).tokens
    assert not np.array_equal(drawn, run.draft([1, 2, 3]).tokens)
    base = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3, 40)), jnp.float32)
    weights = markov(np.zeros((40, 2)), np.zeros((40, 2)))
    tokens, _ = pick(weights, jnp.zeros(3, jnp.int32), base, None, inputs)
    for position in range(5):
        alone = sample(base[position], inputs._replace(positions=positions + position))
        assert np.array_equal(tokens[position], alone)


@pytest.fixture(scope="module")
def stage_program():
    return jax.jit(draft_stage, static_argnames=("setup",))


def test_quantized_stages_follow_the_reference_stage_by_stage(stage_program):
    """Each stage from the reference's streams. A block may depart only if the reference rounded some value of it from
    within float32 noise of a rounding boundary, and most blocks have none."""
    model, draft = driver.load(quantized=True)
    near = [False]

    def probe(_site, values, quantize):
        quantized = quantize(values)
        noise = 4e-7 * (np.abs(values) + np.sqrt(np.mean(values**2, axis=-1, keepdims=True)))
        near[0] |= bool(((quantize(values + noise) != quantized) | (quantize(values - noise) != quantized)).any())
        return quantized

    reference = ReferenceDraft(driver.open_checkpoint(), probe=probe)
    geometry = model.setup.geometry
    rng = np.random.default_rng(2)
    pools = Driver(model, draft).pools
    clear = 0
    for trial, end in enumerate((1, 5, 9, 13, 20, 31, 33, 47)):
        features = rng.normal(size=(end, 3 * model.setup.config.text.hidden_size)).astype(np.float32) * 3
        context = reference.context_keys(features.astype(np.float64), np.arange(end))
        kept = np.arange(max(0, end - geometry.window_size), end)
        window = pools.window
        for stage, keys in enumerate(context):
            place = (geometry.layers + stage, 2, kept % geometry.ring)
            window = store_rows(window, place, jnp.asarray(keys[kept], jnp.float32))
        requests = DraftRequests(*(jnp.asarray([value]) for value in (0, end - 1, 2, True)))
        rows = block_rows(model.params, requests, model.setup)
        streams, pre_mix = reference.first_streams(int(rng.integers(3, 500)))
        for stage in range(3):
            near[0] = False
            record = reference.run_stage(stage, streams, pre_mix, end - 1, context[stage])
            weights = jax.tree.map(lambda leaf, stage=stage: leaf[stage], draft.stages)
            ours, ours_mix = stage_program(
                weights,
                jnp.asarray(streams, jnp.float32),
                jnp.asarray(pre_mix, jnp.float32),
                rows,
                requests,
                pools.replace(window=window),
                jnp.int32((geometry.layers + stage) * window.shape[1]),
                setup=model.setup,
            )
            if not near[0]:
                clear += 1
                scale = np.abs(record.streams).max()
                assert np.abs(ours - record.streams).max() < 1e-5 * scale, (trial, stage)
                assert np.abs(ours_mix - record.pre_mix).max() < 1e-5
            streams, pre_mix = record.streams, record.pre_mix
    assert clear >= 12


def markov(embed, head):
    unused = jnp.zeros((1, 1))
    embed, head = jnp.asarray(embed, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16)
    return DraftParameters(LinearWeight(unused), unused, None, unused, embed, head, unused)


def test_the_published_picking_example():
    weights = markov([[1, 0], [0, 1], [1, 1], [-1, 0.5]], [[0, 0], [1, 0], [0, 1], [2, -1]])
    base = jnp.array([[1.5, 0.2, 0.4, 0.3], [2.5, 0, 0, 0.4], [1, 0.5, 3, 1.2]], jnp.float32)
    tokens, confidence = pick(weights, jnp.array([2]), base[:, None, :])
    assert tokens[:, 0].tolist() == [0, 0, 3] and confidence is None
    assert base.argmax(1).tolist() == [0, 0, 2]


def visible_slots(window, ring, last, width=5):
    """Ring slots and block keys that the queries of a block attend to, read off a uniform attention."""
    config = preset("pico")
    setup = ModelSetup(config, geometry_of(config, Precision(), speculative_tokens=5))
    table = RopeTable(jnp.ones((last + 8, 2)), jnp.zeros((last + 8, 2)))
    params = Parameters(None, None, None, plain=table, yarn=table, runs=())
    requests = DraftRequests(*(jnp.asarray([value]) for value in (0, last, 0, True)))
    rows = block_rows(params, requests, setup)
    width_of_keys = ring + width + 4
    eye = jnp.eye(ring + width, width_of_keys)
    output = sparse_attention(
        jnp.zeros((width, 1, width_of_keys)),
        jnp.full(1, -jnp.inf),
        jnp.broadcast_to(jnp.arange(width), (width, width)),
        jnp.full(width, width),
        eye[None, ring:],
        jnp.zeros((1, 1), jnp.int32),
        rows.batch_ids,
        requests.slots,
        eye[None, :ring],
        eye[:0],
        rows.positions,
        rows.window_floor,
        rows.in_forward_from,
        rows.in_forward_row,
        rows.plain.cos,
        rows.plain.sin,
        window=window,
        scale=1.0,
        main_format="float",
        window_format="float",
    )
    seen = np.asarray(output[:, 0]) > 0
    assert (seen == seen[:1]).all()
    return np.flatnonzero(seen[0]).tolist()


def test_the_published_mask_example():
    assert visible_slots(3, 8, 4) == [2, 3, 4, 8, 9, 10, 11, 12]
    assert visible_slots(3, 8, 9) == [0, 1, 7, 8, 9, 10, 11, 12]


@pytest.mark.parametrize(("last", "first"), [(4, 0), (131, 4), (133, 6), (200, 73)])
def test_production_windows_show_the_positions_up_to_the_last_committed_one(last, first):
    expected = sorted(position % 133 for position in range(first, last + 1))
    assert visible_slots(128, 133, last) == [*expected, *range(133, 138)]


def test_rotations_of_a_ragged_batch_are_those_of_each_request_alone():
    model, _ = driver.load()
    last = jnp.array([0, 12, 130, 77])
    live = jnp.array([True, True, True, False])
    rows = block_rows(model.params, DraftRequests(last, last, last, live), model.setup)
    assert rows.batch_ids.tolist() == [*[0] * 5, *[1] * 5, *[2] * 5, *[-1] * 5]
    for index, position in enumerate(last.tolist()):
        alone = at_positions(model.params.plain, position + 1 + jnp.arange(5))
        for ours, theirs in zip(rows.plain, alone):
            assert np.array_equal(ours[5 * index : 5 * index + 5], theirs)


@pytest.mark.parametrize("start", [3, 13, 127, 128, 265])
def test_zeroing_the_last_drafted_ring_row_changes_only_the_last_querys_output(start):
    """Invariant 42, at ring phases on both sides of a wrap."""
    config = preset("v4.1-flash")
    setup = ModelSetup(config, geometry_of(config, Precision(), speculative_tokens=5))
    geometry = setup.geometry
    rng = np.random.default_rng(start)
    positions = np.arange(start, start + 6, dtype=np.int32)
    table = RopeTable(jnp.ones((start + 6, 4)), jnp.zeros((start + 6, 4)))
    batch = _decode_batch(positions, geometry)
    rows = prepare_rows(batch, table, table, ring=geometry.ring, phase="decode")
    query = jnp.asarray(rng.normal(size=(6, 2, 32)), jnp.float32)
    ring = jnp.asarray(rng.normal(size=(1, geometry.ring, 32)), jnp.float32)
    slots = jnp.zeros(1, jnp.int32)
    keys = jnp.asarray(rng.normal(size=(6, 32)), jnp.float32)
    written = write_ring(ring, keys, rows, slots, 0, window_format="float")
    zeroed = written.at[0, int(positions[-1]) % geometry.ring].set(0)

    def attend(window):
        nothing = jnp.zeros((6, 0), jnp.int32)
        return sparse_attention(
            query,
            jnp.zeros(2),
            nothing,
            jnp.zeros(6, jnp.int32),
            None,
            jnp.zeros((1, 1), jnp.int32),
            rows.batch_ids,
            slots,
            window,
            keys[:0],
            rows.positions,
            rows.window_floor,
            rows.in_forward_from,
            rows.in_forward_row,
            rows.plain.cos,
            rows.plain.sin,
            window=geometry.window_size,
            scale=1.0,
            main_format="float",
            window_format="float",
        )

    before, after = np.asarray(attend(written)), np.asarray(attend(zeroed))
    assert np.array_equal(before[:-1], after[:-1]) and not np.allclose(before[-1], after[-1])


def _decode_batch(positions, geometry):
    count = len(positions)
    span = Span(
        start=int(positions[0]),
        token_ids=np.zeros(count, np.int32),
        compressed_ids=np.zeros(count, np.int32),
        slot=0,
        pages=range(geometry.pages_for(int(positions[-1]) + 1)),
        history=np.zeros(geometry.history_size, np.int32),
    )
    return batch_of([span], geometry)


def with_text(**changes):
    root = preset_dict("pico")
    root["text_config"].update(changes)
    return ModelConfig.from_dict(root)


def test_models_and_pools_that_cannot_draft_are_refused():
    config = preset("pico")
    check_draft(ModelSetup(config, geometry_of(config, Precision(), speculative_tokens=5)))
    with pytest.raises(ValueError, match=r"speculative_tokens 6 is outside 1\.\.5"):
        check_draft(ModelSetup(config, geometry_of(config, Precision(), speculative_tokens=6)))
    tapped = with_text(dspark_target_layer_ids=[4, 10, 11])
    with pytest.raises(ValueError, match="dspark_target_layer_ids 4 is an Engram layer"):
        check_draft(ModelSetup(tapped, geometry_of(tapped, Precision(), speculative_tokens=5)))
