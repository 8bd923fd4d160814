"""The reference model as a whole: chunks, replay visibility, teacher forcing, rounding, and what it refuses."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.helpers import golden
from v41jax.reference import FROM_FORWARD, FROM_STATE, HIDDEN, LayerVisibility, ReferenceModel, SequenceState
from v41jax.reference.numerics import round_to_bfloat16

LENGTH = 45
IMAGE = slice(20, 26)

STATE_TABLES = ("window", "compressed", "index_keys")


def prompt(model: ReferenceModel) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids with an image span across a group and a window border, its rows, and its embeddings."""
    random = np.random.default_rng(11)
    rows = np.zeros(LENGTH, bool)
    rows[IMAGE] = True
    ids = random.integers(3, model.config.text.vocab_size, LENGTH)
    return ids, rows, random.standard_normal((rows.sum(), model.config.text.hidden_size))


def run(model: ReferenceModel, begin: int, end: int, state: SequenceState | None = None, **options):
    ids, rows, embeddings = prompt(model)
    before, count = rows[:begin].sum(), rows[begin:end].sum()
    images = (rows[begin:end], embeddings[before : before + count]) if count else ()
    return model.forward(ids[begin:end], *images, state=state, **options)


def same_state(ours: SequenceState, theirs: SequenceState) -> None:
    assert ours.length == theirs.length
    assert np.array_equal(ours.compressed_ids, theirs.compressed_ids)
    for name in STATE_TABLES:
        left, right = getattr(ours, name), getattr(theirs, name)
        assert left.keys() == right.keys()
        for layer in left:
            np.testing.assert_allclose(left[layer], right[layer], atol=1e-11, err_msg=f"{name} of layer {layer}")


@pytest.fixture
def exact(make_model):
    return make_model("pico", activation_quantization=False)


@pytest.mark.parametrize("cuts", [range(1, LENGTH), (1, 2, 23), (17,), (21, 22, 40)])
def test_any_chunking_equals_the_whole(exact, cuts):
    whole = run(exact, 0, LENGTH)
    state, logits = None, []
    for begin, end in zip((0, *cuts), (*cuts, LENGTH)):
        output = run(exact, begin, end, state, record=False)
        state = output.state
        logits.append(output.logits)
    np.testing.assert_allclose(np.concatenate(logits), whole.logits, atol=1e-10)
    same_state(state, whole.state)


def test_a_forward_leaves_the_state_it_was_given_alone(exact):
    state = run(exact, 0, 21).state
    kept = {name: {layer: table.copy() for layer, table in getattr(state, name).items()} for name in STATE_TABLES}
    run(exact, 21, LENGTH, state)
    assert state.length == 21 and state.compressed_ids.size == 21
    for name in STATE_TABLES:
        assert all(np.array_equal(kept[name][layer], table) for layer, table in getattr(state, name).items())


def backed_off(start: int, resume: int, stop: int, window: int) -> LayerVisibility:
    """Rows below `resume` recompute with windows cut at `start`; rows from it on see the kept rows below it."""
    causal = LayerVisibility.causal(resume, stop, window)
    rows = np.arange(start, stop)[:, None]
    positions = np.arange(stop)[None]
    seen = (positions <= rows) & (positions > rows - window)
    early = np.where(seen & (positions >= start), FROM_FORWARD, HIDDEN)
    late = np.where(seen, np.where(positions < resume, FROM_STATE, FROM_FORWARD), HIDDEN)
    assert np.array_equal(late[resume - start :], causal.window)
    bank = np.where(rows < resume, early, late).astype(np.int8)
    every = np.ones(stop - start, bool)
    return LayerVisibility(every, every, bank, write_from=resume, keep_below=resume)


@pytest.mark.parametrize("resume", [29, 30])
def test_recomputed_rows_change_neither_later_rows_nor_the_state(exact, resume):
    """A back-off whose rows from `resume` on read only kept state equals a forward that resumes there."""
    state = run(exact, 0, resume).state
    resumed = run(exact, resume, LENGTH, state)
    start = resume - 9
    visibility = backed_off(start, resume, LENGTH, exact.config.text.sliding_window)
    replayed = run(exact, start, LENGTH, state, start=start, visibility=lambda layer: visibility)
    np.testing.assert_allclose(replayed.logits[9:], resumed.logits, atol=1e-10)
    same_state(replayed.state, resumed.state)
    assert np.abs(replayed.logits[:9] - run(exact, 0, LENGTH).logits[start:resume]).max() > 1e-3


def test_rows_that_stop_early_are_nan_and_leave_the_others_exact(exact):
    """The last layer may query one row only, provided every row still gives its window KV."""
    whole = run(exact, 0, LENGTH)
    last = len(exact.config.layers) - 1
    causal = LayerVisibility.causal(0, LENGTH, exact.config.text.sliding_window)
    only = np.arange(LENGTH) == LENGTH - 1
    narrowed = dataclasses.replace(causal, query_rows=only)
    output = run(exact, 0, LENGTH, visibility=lambda layer: narrowed if layer == last else causal)
    np.testing.assert_allclose(output.logits[-1], whole.logits[-1], atol=1e-10)
    assert np.isnan(output.logits[:-1]).all()
    same_state(output.state, whole.state)


def test_compression_runs_where_nothing_else_does(exact):
    """A forward that ends after the decoder source's compression still extends its memory, and no window after it."""
    owner = exact.config.text.kv_source_layer_ids[-1]
    causal = LayerVisibility.causal(0, LENGTH, exact.config.text.sliding_window)
    nothing = np.zeros(LENGTH, bool)
    stopped = LayerVisibility(nothing, nothing, np.zeros_like(causal.window))
    output = run(exact, 0, LENGTH, visibility=lambda layer: causal if layer < owner else stopped)
    whole = run(exact, 0, LENGTH).state
    for name in ("compressed", "index_keys"):
        np.testing.assert_allclose(getattr(output.state, name)[owner], getattr(whole, name)[owner], atol=1e-11)
    assert np.isnan(output.state.window[owner]).all() and np.isnan(output.logits).all()


def test_a_window_floor_hides_exactly_the_positions_below_it(exact):
    """Rows of a fresh run that starts at `floor` match a masked run where nothing global or hashed reaches below."""
    floor, layer = 18, 0
    causal = LayerVisibility.causal(0, LENGTH, exact.config.text.sliding_window)
    masked = causal.window.copy()
    masked[floor:, :floor] = HIDDEN
    inputs, memory = exact.begin(prompt(exact)[0])
    streams, pre_mix = exact.first_streams(inputs)
    full = exact.run_layer(layer, streams, pre_mix, inputs, memory, dataclasses.replace(causal, window=masked))
    # A window-only layer is the same function of its visible rows wherever they stand: rotary scores are relative.
    inputs, memory = exact.begin(prompt(exact)[0][floor:])
    alone = exact.run_layer(layer, *exact.first_streams(inputs), inputs, memory)
    np.testing.assert_allclose(full.streams[floor:], alone.streams, atol=1e-5)


def test_teacher_forced_layers_equal_the_forward(make_model):
    model = make_model("pico")
    whole = run(model, 0, LENGTH)
    ids, rows, embeddings = prompt(model)
    inputs, memory = model.begin(ids, rows, embeddings)
    for record in whole.layers:
        again = model.run_layer(record.layer, record.input_streams, record.input_pre_mix, inputs, memory)
        assert np.array_equal(again.streams, record.streams)


def test_records_hold_what_their_layer_has(exact):
    records = run(exact, 0, LENGTH).layers
    text = exact.config.text
    for record, topology in zip(records, exact.config.layers):
        source = topology.index == topology.topk_owner
        assert (record.topk is not None) == (topology.ratio > 0)
        assert (record.index_scores is not None) == source
        assert (record.compressed is not None) == (topology.index == topology.kv_owner)
        assert (record.engram_gates is not None) == (topology.engram is not None)
        assert (record.candidate_blocks is not None) == (topology.index == text.candidate_source_layer_id)
        assert record.router_choices.shape == (LENGTH, text.num_experts_per_tok)
        assert (np.diff(record.router_choices, axis=1) > 0).all()
        for name in ("streams", "window_rows", "attention_output", "ffn_output", "ffn_input"):
            assert np.isfinite(getattr(record, name)).all()
        if record.compressed is not None:
            assert record.compressed.shape == (LENGTH // topology.ratio, text.head_dim)
        if record.engram_gates is not None:
            assert not record.engram_gates[IMAGE].any() and record.engram_gates[: IMAGE.start].all()
            assert np.array_equal(record.mixed_streams[IMAGE], record.input_streams[IMAGE])


def test_consumers_select_inside_the_candidates_and_the_source_does_not(exact):
    """Long enough that candidates leave entries out, so that the restriction is seen to act."""
    ids = golden.load_expected("pico").prompt(5)[:120]
    records = exact.forward(ids).layers
    text = exact.config.text
    blocks = records[text.candidate_source_layer_id].candidate_blocks
    outside = {
        layer: sum(
            not np.isin(record.topk[row][record.topk[row] >= 0] // text.candidate_block_size, blocks[row]).all()
            for row in range(ids.size)
        )
        for layer, record in enumerate(records)
        if layer in (6, 8, 10)
    }
    assert outside[6] > 0 and outside[8] == outside[10] == 0


def test_released_rounding_points_leave_bfloat16_values(make_model):
    model = make_model("pico", rounding="bfloat16")
    output = run(model, 0, LENGTH)
    for record in output.layers:
        for name in (
            *("streams", "mixed_streams", "attention_input", "attention_output", "attention_streams"),
            *("ffn_input", "ffn_output", "window_rows"),
            *(("compressed", "index_keys") if record.compressed is not None else ()),
            *(("index_query", "index_head_weights") if record.index_query is not None else ()),
        ):
            value = getattr(record, name)
            assert np.array_equal(round_to_bfloat16(value), value), (record.layer, name)
    assert np.array_equal(round_to_bfloat16(output.hidden), output.hidden)


@pytest.mark.parametrize("name", golden.CHECKPOINTS)
def test_released_rounding_points_move_a_layer_by_less_than_one_percent(name, make_model):
    """Teacher-forced and without quantization, so that no flip is amplified."""
    exact = make_model(name, activation_quantization=False)
    rounded = make_model(name, activation_quantization=False, rounding="bfloat16")
    whole = run(exact, 0, LENGTH)
    ids, rows, embeddings = prompt(exact)
    inputs, memory = rounded.begin(ids, rows, embeddings)
    for record in whole.layers:
        again = rounded.run_layer(record.layer, record.input_streams, record.input_pre_mix, inputs, memory)
        if record.layer in memory.selections:  # near ties may select differently; later layers share one list
            memory.selections[record.layer] = record.topk
        error = np.linalg.norm(again.streams - record.streams, axis=(1, 2)) / np.linalg.norm(
            record.streams, axis=(1, 2)
        )
        assert 0 < np.median(error) < 1e-2


def test_index_options_change_scores_only_slightly(make_model):
    plain = run(make_model("pico"), 0, LENGTH).layers[2].index_scores
    for options in ({"index_rounding": "bfloat16"}, {"index_format": "fp8"}):
        other = run(make_model("pico", **options), 0, LENGTH).layers[2].index_scores
        seen = np.isfinite(plain)
        assert np.array_equal(seen, np.isfinite(other))
        error = np.linalg.norm(other[seen] - plain[seen]) / np.linalg.norm(plain[seen])
        assert 0 < error < 0.2


def test_weights_need_not_be_held(make_model):
    held, fresh = make_model("five-layer"), make_model("five-layer", keep_weights=False)
    assert np.array_equal(run(held, 0, 12).logits, run(fresh, 0, 12).logits)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "one or more ids"),
        (([1, 512],), r"outside 0\.\.511"),
        (([1, 2], [True]), r"image_rows has shape \(1,\) where token_ids has \(2,\)"),
        (([1, 2], [True, False]), "0 image embeddings for 1 image rows"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(exact, arguments, message):
    with pytest.raises(ValueError, match=message):
        exact.forward(*arguments)


def test_a_start_past_the_state_is_refused(exact):
    with pytest.raises(ValueError, match=r"start 3 is outside 0\.\.0"):
        exact.forward([1], start=3)
