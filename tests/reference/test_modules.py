"""Modules of the reference against published vectors and against loops written from the definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.engram import pico_config, with_text
from v41jax.reference import engram, feed_forward
from v41jax.reference.attention import attend, grouped_output, pool_pairs
from v41jax.reference.hyper_connections import Mixes, collapse, expand, mixes, split_mixes
from v41jax.reference.numerics import Arithmetic, round_to_bfloat16, sigmoid
from v41jax.reference.records import FROM_FORWARD, FROM_STATE, HIDDEN, LayerVisibility
from v41jax.reference.selection import index_scores, select_candidates, select_topk, within_candidates

EXACT = Arithmetic(activation_quantization=False)
ROUNDED = Arithmetic(rounding="bfloat16", activation_quantization=False)
RANDOM = np.random.default_rng(7)


def test_hyper_connection_coefficients():
    z = ((7 * np.arange(24)) % 11 - 5)[None] / 4.0
    found = split_mixes(z, np.ones(3), np.zeros(24), 4, 20, 1e-6)
    assert np.allclose(found.pre, [[0.22270113, 0.62246037, 0.3775417, 0.7773009]], atol=2e-7)
    assert np.allclose(found.post, [[1.124353, 0.6416426, 1.4621172, 1.0]], atol=2e-7)
    expected = [
        [0.15266831, 0.4365122, 0.25814995, 0.15266852],
        [0.2581501, 0.04718636, 0.43651253, 0.25815004],
        [0.15266831, 0.4365122, 0.25814995, 0.15266852],
        [0.4365123, 0.07978829, 0.04718656, 0.43651193],
    ]
    assert np.allclose(found.combination, [expected], atol=3e-7)
    assert np.allclose(found.combination.sum(axis=1), 0.999999, atol=1e-6)


def test_mixes_normalize_the_whole_stream_vector_and_scale_by_kind():
    text = pico_config().text
    streams, fn = RANDOM.standard_normal((2, 4, 8)), RANDOM.standard_normal((24, 32))
    scale, base = np.array([0.5, 2.0, 3.0]), RANDOM.standard_normal(24)
    found = mixes(streams, fn, scale, base, text)
    flat = streams.reshape(2, 32)
    z = flat @ fn.T / np.sqrt((flat**2).mean(axis=1, keepdims=True))
    assert np.allclose(found.pre, sigmoid(0.5 * z[:, :4] + base[:4]) + 1e-6)
    assert np.allclose(found.post, 2 * sigmoid(2 * z[:, 4:8] + base[4:8]))


def test_collapse_and_expand_follow_source_and_destination():
    streams, y = RANDOM.standard_normal((3, 4, 8)), RANDOM.standard_normal((3, 8))
    coefficients = Mixes(*(RANDOM.standard_normal(shape) for shape in ((3, 4), (3, 4), (3, 4, 4))))
    assert np.allclose(
        collapse(streams, coefficients.pre, EXACT), sum(coefficients.pre[:, s, None] * streams[:, s] for s in range(4))
    )
    result = expand(y, streams, coefficients, EXACT)
    for k in range(4):
        carried = sum(coefficients.combination[:, j, k, None] * streams[:, j] for j in range(4))
        assert np.allclose(result[:, k], coefficients.post[:, k, None] * y + carried)


def test_router_score_function():
    logits = np.array([[-30, -20, -1, 0, 1, 20, 25]], float)
    expected = [3.05902e-07, 4.53999e-05, 0.559698, 0.832555, 1.145976, 4.472136, 5.0]
    assert np.allclose(feed_forward.router_scores(logits, "sqrtsoftplus"), [expected], rtol=2e-6)
    with pytest.raises(ValueError, match="scoring_func is 'tanh'"):
        feed_forward.router_scores(logits, "tanh")


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_other_score_functions(scoring):
    logits = np.array([[-1000.0, 0.0, 1.0]])
    scores = feed_forward.router_scores(logits, scoring)[0]
    share = {"sigmoid": 1 / (1 + np.exp(-1)), "softmax": np.e / (1 + np.e)}[scoring]
    assert scores[0] == 0 and np.isclose(scores[2], share)


def test_selection_bias_changes_the_choice_and_not_the_weights():
    text = with_text(pico_config(), num_experts_per_tok=2, routed_scaling_factor=1.5).text
    x, gate = np.ones((2, 1)), np.array([[0.0], [1.0], [2.0], [2.0]])
    bias, bias_vl = np.array([9.0, 0, 0, 0]), np.array([0.0, 9.0, 0, 0])
    scores, choices, weights = feed_forward.route(x, gate, bias, bias_vl, np.array([False, True]), text)
    # Experts 2 and 3 tie; the smaller id wins.
    assert choices.tolist() == [[0, 2], [1, 2]]
    for row in range(2):
        chosen = scores[row, choices[row]]
        assert np.allclose(weights[row], 1.5 * chosen / chosen.sum())


def naive_expert(x, w1, w2, w3, weight, limit):
    gate, up = np.minimum(w1 @ x, limit), np.clip(w3 @ x, -limit, limit)
    return w2 @ (weight * gate / (1 + np.exp(-gate)) * up)


def test_mixture_is_the_sum_of_weighted_experts_and_the_shared_one():
    x = 5 * RANDOM.standard_normal((5, 32))
    experts = [tuple(RANDOM.standard_normal(shape) for shape in ((16, 32), (32, 16), (16, 32))) for _ in range(4)]
    choices = np.array([[0, 1], [1, 3], [0, 3], [2, 3], [1, 2]], np.int32)
    weights = RANDOM.random((5, 2))
    result = feed_forward.mixture(x, choices, weights, lambda e: experts[e], experts[3], 10.0, EXACT, "layer").output
    for row in range(5):
        expected = naive_expert(x[row], *experts[3], 1.0, 10.0)
        for expert, weight in zip(choices[row], weights[row]):
            expected = expected + naive_expert(x[row], *experts[expert], weight, 10.0)
        assert np.allclose(result[row], expected)


def test_engram_gate_fixture():
    streams = np.array([[[1, -2, 0.5, 3], [0.25, 0.5, -1, 2]]])
    q, k = np.array([[1, 1, 1, 1], [0.5, 2, 1, 1]]), np.array([[1, 0.5, 1, 1], [1, 1, -1, 1]])
    keys, value = np.array([[[0.5, 1, -1, 2], [2, 0, 1, -0.5]]]), np.array([[1, -1, 0.5, 2]])
    gate = engram.gates(streams, keys, q * k, 1e-20)
    assert np.allclose(gate, [[0.7367959327, 0.5763225376]], atol=1e-10)
    updated = streams + gate[:, :, None] * value[:, None]
    expected = [[1.7367959, -2.7367959, 0.8683980, 4.4735919], [0.8263225, -0.0763225, -0.7118387, 3.1526451]]
    assert np.allclose(updated, [expected], atol=1e-7)


def test_engram_gate_at_zero_and_negative_dots():
    streams, keys = np.array([[[1.0, 0], [1, 0]]]), np.array([[[0.0, 1], [-1, 0]]])
    gate = engram.gates(streams, keys, np.ones((2, 2)), 1e-20)[0]
    assert np.isclose(gate[0], 0.50025, atol=1e-7) and np.isclose(gate[1], sigmoid(np.array(-(2**0.25))))


@pytest.mark.parametrize("arithmetic", [EXACT, ROUNDED])
def test_dead_rows_keep_their_streams_to_the_bit(arithmetic):
    streams, rows = RANDOM.standard_normal((3, 2, 4)), RANDOM.standard_normal((3, 32))
    dead = np.array([False, True, False])
    wkv, gate_weights = RANDOM.standard_normal((12, 32)), RANDOM.standard_normal((2, 4))
    updated, gate = engram.update(streams, rows, dead, wkv, gate_weights, 1e-20, arithmetic, "site")
    assert np.array_equal(updated[1], streams[1]) and not gate[1].any()
    assert (updated[[0, 2]] != streams[[0, 2]]).all()


def test_engram_update_takes_stream_keys_first_and_the_value_last():
    streams, rows = RANDOM.standard_normal((1, 2, 4)), RANDOM.standard_normal((1, 32))
    wkv, weights = RANDOM.standard_normal((12, 32)), RANDOM.standard_normal((2, 4))
    updated, gate = engram.update(streams, rows, np.array([False]), wkv, weights, 1e-20, EXACT, "site")
    projected = wkv @ rows[0]
    assert np.allclose(gate, engram.gates(streams, projected[:8].reshape(1, 2, 4), weights, 1e-20))
    assert np.allclose(updated[0], streams[0] + gate[0][:, None] * projected[8:])


def test_pooled_pairs_are_a_softmax_per_channel():
    values, gates = RANDOM.standard_normal((5, 2, 3)), RANDOM.standard_normal((5, 2, 3))
    share = 1 / (1 + np.exp(gates[:, 1] - gates[:, 0]))
    assert np.allclose(pool_pairs(values, gates), share * values[:, 0] + (1 - share) * values[:, 1])


def test_grouped_output_keeps_groups_of_heads_apart():
    attended, wo_a = RANDOM.standard_normal((3, 4, 6)), RANDOM.standard_normal((2 * 5, 12))
    result = grouped_output(attended, wo_a, 2, EXACT)
    for group in range(2):
        heads = attended[:, 2 * group : 2 * group + 2].reshape(3, 12)
        assert np.allclose(result[:, 5 * group : 5 * group + 5], heads @ wo_a[5 * group : 5 * group + 5].T)


def naive_attention(query, sink, keys, scale, arithmetic):
    """One head of one row over a list of keys, in order, repeats included."""
    scores = [scale * float(query @ key) for key in keys]
    peak = max(scores)
    weights = [np.exp(score - peak) for score in scores]
    value = sum(arithmetic.activation(np.array(w)) * key for w, key in zip(weights, keys))
    return arithmetic.activation(value / (sum(weights) + np.exp(sink - peak)))


@pytest.mark.parametrize("arithmetic", [EXACT, ROUNDED])
@pytest.mark.parametrize("with_entries", [False, True])
def test_attention_equals_a_loop_over_its_keys(arithmetic, with_entries):
    n, start, heads, width = 9, 4, 2, 6
    query, sink = RANDOM.standard_normal((n - start, heads, width)), RANDOM.standard_normal(heads)
    state, forward = RANDOM.standard_normal((n, width)), RANDOM.standard_normal((n, width))
    state[5:], forward[:3] = np.nan, np.nan
    window = RANDOM.choice([HIDDEN, FROM_STATE, FROM_FORWARD], (n - start, n)).astype(np.int8)
    window[:, 5:] = np.where(window[:, 5:] == FROM_STATE, HIDDEN, window[:, 5:])
    window[:, :3] = np.where(window[:, :3] == FROM_FORWARD, HIDDEN, window[:, :3])
    window[:, 3] = FROM_FORWARD
    compressed = RANDOM.standard_normal((4, width))
    selected = np.array([[0, 3, -1], [-1, -1, -1], [1, -1, -1], [0, 1, 2], [2, 3, -1]], np.int32)
    result = attend(
        query,
        sink,
        state,
        forward,
        window,
        compressed if with_entries else None,
        selected if with_entries else None,
        0.4,
        arithmetic,
    )
    for row in range(n - start):
        keys = [(state if bank == FROM_STATE else forward)[p] for p, bank in enumerate(window[row]) if bank != HIDDEN]
        keys += [compressed[entry] for entry in selected[row] if entry >= 0] if with_entries else []
        for head in range(heads):
            expected = naive_attention(query[row, head], sink[head], keys, 0.4, arithmetic)
            assert np.allclose(result[row, head], expected, rtol=1e-12)


def test_causal_visibility_is_the_last_window_positions_from_the_right_bank():
    window = LayerVisibility.causal(3, 6, 3).window
    assert window.tolist() == [[0, 1, 1, 2, 0, 0], [0, 0, 1, 2, 2, 0], [0, 0, 0, 2, 2, 2]]


@pytest.mark.parametrize("rounding", ["none", "bfloat16"])
def test_index_scores_equal_a_loop(rounding):
    arithmetic = Arithmetic(activation_quantization=False, index_rounding=rounding)
    query, keys, weights = (
        RANDOM.standard_normal((3, 2, 8)),
        RANDOM.standard_normal((5, 8)),
        RANDOM.standard_normal((3, 2)),
    )
    visible = np.array([0, 2, 5])
    scores = index_scores(query, keys, weights, visible, arithmetic)
    cast = round_to_bfloat16 if rounding == "bfloat16" else np.asarray
    for row in range(3):
        for entry in range(5):
            parts = [cast(max(float(cast(query[row, h] @ keys[entry])), 0.0) * weights[row, h]) for h in range(2)]
            expected = float(cast(parts[0] + parts[1])) if entry < visible[row] else -np.inf
            assert np.isclose(scores[row, entry], expected, rtol=1e-12, atol=0)


SCORES = st.sampled_from([-np.inf, np.nan, -1.0, -0.0, 0.0, 0.5, 2.0])


def best_entries(row, count):
    """The definition: higher first, then smaller id; NaN and -inf never."""
    usable = [entry for entry, score in enumerate(row) if score > -np.inf]
    return sorted(sorted(usable, key=lambda entry: (-row[entry] + 0.0, entry))[:count])


@settings(max_examples=200)
@given(st.lists(SCORES, max_size=12), st.integers(1, 6))
def test_topk_follows_the_total_order(row, count):
    found = select_topk(np.array([row], float).reshape(1, -1), count)[0].tolist()
    expected = best_entries(row, count)
    assert found == expected + [-1] * (count - len(expected))


@settings(max_examples=200)
@given(st.lists(SCORES, max_size=14), st.integers(1, 4), st.integers(1, 4), st.data())
def test_candidates_keep_the_best_blocks_and_the_newest(row, blocks, size, data):
    visible = data.draw(st.integers(0, len(row)))
    scores = np.array([row[:visible] + [-np.inf] * (len(row) - visible)], float).reshape(1, -1)
    found = select_candidates(scores, np.array([visible]), blocks, size)[0]
    maxima = [
        max([s for s in scores[0, b : b + size] if not np.isnan(s)], default=-np.inf) for b in range(0, len(row), size)
    ]
    if visible:
        maxima[(visible - 1) // size] = np.inf
    expected = best_entries(maxima, blocks)
    assert found.tolist() == expected + [-1] * (blocks - len(expected))
    inside = within_candidates(found[None], size, len(row))[0]
    assert np.flatnonzero(inside).tolist() == [entry for entry in range(len(row)) if entry // size in expected]
