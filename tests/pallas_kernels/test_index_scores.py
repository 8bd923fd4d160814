"""Every implementation of `index_scores` against the float64 oracle, on ragged rows with poisoned unused memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import backend, triton_index_keys
from pallas_kernels.index_scores import index_scores, tpu, triton, xla
from pallas_kernels.plane_layouts import to_lanes
from tests.pallas_kernels.index_oracle import decode_plane, index_case, scores_oracle
from tests.pallas_kernels.tpu_modes import interpretation

FORMATS = ("float", "fp8", "fp4")


def assert_scores(found, expected, tolerance=1e-5):
    found = np.asarray(found)
    assert found.dtype == np.float32 and found.shape == expected.shape
    seen = np.isfinite(expected)
    np.testing.assert_array_equal(np.isneginf(found), ~seen)
    peak = np.abs(expected[seen]).max(initial=0)
    np.testing.assert_allclose(found[seen], expected[seen], rtol=0, atol=tolerance * peak)


@pytest.mark.parametrize("index_format", FORMATS)
@pytest.mark.parametrize(("rows", "requests"), [(7, 5), (40, 3)], ids=["decode", "prefill"])
def test_scores_equal_the_oracle_whatever_lies_past_the_bounds(index_format, rows, requests):
    case = index_case(rows, index_format=index_format, rows=rows, requests=requests, columns=3, padding=rows > 1)
    assert_scores(index_scores(*case.arrays, index_format=index_format), scores_oracle(case))


@pytest.mark.parametrize(
    ("index_format", "rows", "requests", "config"),
    [
        ("fp8", 7, 5, triton.Config(1, 1, 16, 2, 4, 2)),
        ("fp8", 9, 1, triton.Config(8, 4, 16, 3, 4, 2)),
        ("fp4", 11, 3, triton.Config(6, 4, 32, 1, 4, 2)),
        ("fp8", 9, 2, triton.Config(8, 4, 32, 2, 4, 2, decoded=True)),
        ("fp4", 11, 3, triton.Config(4, 4, 16, 2, 4, 2, decoded=True)),
    ],
    ids=[
        "a row a program, tiles in a page",
        "a group of one request",
        "rows of several requests, tiles over pages",
        "keys decoded first, a tile past the end",
        "keys decoded first, rows of several requests",
    ],
)
def test_the_gpu_kernel_equals_the_oracle(index_format, rows, requests, config):
    case = index_case(rows, index_format=index_format, rows=rows, requests=requests, columns=3, heads=16)
    found = triton.index_scores(*case.arrays, index_format=index_format, config=config, interpret=True)
    assert_scores(found, scores_oracle(case))


@pytest.mark.parametrize(
    ("mode", "index_format", "rows_in_page", "together"),
    [
        ("generic", "fp8", 128, 1),
        ("generic", "fp4", 64, 8),
        ("simulated", "fp8", 64, 8),
        ("simulated", "fp4", 128, 1),
    ],
)
def test_the_tpu_kernel_equals_the_oracle(mode, index_format, rows_in_page, together):
    shape = {"rows": 11, "requests": 3, "columns": 5, "heads": 8, "width": 128}
    case = index_case(3, index_format=index_format, rows_in_page=rows_in_page, **shape)
    *operands, values, scales = case.arrays
    plane = (values, scales) if rows_in_page == 128 else to_lanes(values, scales, index_format)
    config = tpu.Config(rows=8, together=together, lines=2, group=1, depth=3)
    with interpretation(mode) as interpret:
        run = functools.partial(tpu.index_scores, index_format=index_format, config=config, interpret=interpret)
        found = jax.block_until_ready(jax.jit(run)(*operands, *plane))
    assert_scores(found, scores_oracle(case))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 4), st.integers(0, 50)), min_size=16, max_size=16))
def test_every_block_and_request_that_meet_are_one_pair(rows):
    owners, bounds = (np.asarray(x, np.int32) for x in zip(*rows))
    count, (block, request, seen, stacks) = tpu.pairs_of(jnp.asarray(owners), jnp.asarray(bounds), 8, 2)
    # Past the count there is padding; a block without rows of its own has one pair that holds no row.
    blocks = [int(b) for b in block[: int(count[0])]]
    listed = [tuple(map(int, pair)) for pair in zip(blocks, request, seen, stacks)]
    live = [pair for pair in listed if pair[3]]
    found = {pair[:2]: pair[2:] for pair in live}
    expected = {}
    for row, (owner, bound) in enumerate(rows):
        if owner >= 0:
            seen_before, mask = expected.get((row // 8, owner), (0, 0))
            expected[row // 8, owner] = max(seen_before, bound), mask | 1 << (row % 8 // 2)
    assert found == expected and len(live) == len(expected)
    assert sorted(blocks) == blocks and set(blocks) == {0, 1} and len(blocks) - len(expected) <= 2


def test_a_plane_in_the_tpu_layout_scores_the_same_everywhere():
    case = index_case(3, index_format="fp8", rows=4, requests=2, columns=2, rows_in_page=64, width=128)
    *operands, values, scales = case.arrays
    found = index_scores(*operands, *to_lanes(values, scales, "fp8"), index_format="fp8")
    assert_scores(found, scores_oracle(case))


def test_a_tpu_reports_which_planes_it_would_have_to_copy():
    case = index_case(3, index_format="fp4", rows=4, requests=2, columns=2, rows_in_page=64, heads=8, width=128)
    backend.clear_report()
    with backend.use_target(backend.Target("tpu", "v6e")):
        index_scores(*case.arrays, index_format="fp4")
    (line,) = backend.report()["index_scores"]
    assert line == "xla (pages of 64 logical rows would be copied; hold the plane as plane_layouts.to_lanes gives it)"


def test_the_gpu_kernel_reads_fp8_planes_past_32_bit_offsets_as_16_bit_elements(monkeypatch):
    case = index_case(2, index_format="fp8", rows=3, requests=2, columns=2, heads=16, padding=0)
    monkeypatch.setattr(triton_index_keys, "LARGEST_OFFSET", case.values.size)
    assert triton.packed_view(case.arrays[5], "fp8").dtype == jnp.uint16
    config = triton.Config(1, 1, 16, 2, 4, 2)
    found = triton.index_scores(*case.arrays, index_format="fp8", config=config, interpret=True)
    assert_scores(found, scores_oracle(case))


def test_group_scales_far_apart_are_exact_to_float32():
    case = index_case(4, index_format="fp4", rows=3, requests=1, columns=1, heads=16, padding=0)
    case.scales[:, 0::2, 1] = 127 - 20
    case.scales[:, 1::2, 1] = 1
    case.decoded = decode_plane(case.values, case.scales, "fp4")
    case.visible[:] = 16
    config = triton.Config(1, 1, 16, 1, 4, 2)
    found = triton.index_scores(*case.arrays, index_format="fp4", config=config, interpret=True)
    assert_scores(found, scores_oracle(case), tolerance=1e-6)


def test_keys_are_decoded_first_where_that_is_a_small_part_of_the_work():
    assert triton.config_for(4096, 1, 8192).decoded and triton.config_for(4096, 64, 65_536).decoded
    assert not triton.config_for(384, 64, 65_536).decoded and not triton.config_for(64, 64, 65_536).decoded


def test_pallas_is_the_kernel_of_the_target():
    case = index_case(7, index_format="fp8", rows=3, requests=2, columns=2, heads=16)
    backend.clear_report()
    found = index_scores(*case.arrays, index_format="fp8", implementation="pallas")
    assert backend.report() == {"index_scores": ("triton (asked for)",)}
    assert_scores(found, scores_oracle(case))


def test_auto_reports_why_it_takes_xla():
    case = index_case(7, index_format="float", rows=3, requests=2, columns=2, heads=16)
    backend.clear_report()
    with backend.use_target(backend.Target("triton", "cuda")):
        index_scores(*case.arrays, index_format="float")
    assert backend.report() == {"index_scores": ("xla (it reads fp8 and fp4 planes, not float)",)}


@pytest.mark.parametrize("index_format", ["fp8"])
def test_a_tile_walks_long_contexts_in_chunks(index_format, monkeypatch):
    monkeypatch.setattr(xla, "CHUNK_KEYS", 32)
    monkeypatch.setattr(xla, "TILE_ROWS", 8)
    case = index_case(5, index_format=index_format, rows=30, requests=2, columns=5)
    assert_scores(index_scores(*case.arrays, index_format=index_format), scores_oracle(case))


def test_rows_in_any_order_give_the_same_scores():
    case = index_case(6, index_format="fp8", rows=30, requests=2, columns=2, padding=4)
    order = np.random.default_rng(0).permutation(30)
    shuffled = [x[order] for x in case.arrays[:4]]
    whole = np.asarray(index_scores(*case.arrays, index_format="fp8"))
    np.testing.assert_array_equal(index_scores(*shuffled, *case.arrays[4:], index_format="fp8"), whole[order])


def test_bfloat16_scores_round_the_dot_each_product_and_the_sum():
    query = jnp.asarray([[[1.0, 2**-7], [1.0, 0.0]]])  # dots of one key (1, 1): 1.0078125 and 1
    weights = jnp.asarray([[1.0, 1 / 256]])
    plane = jnp.ones((1, 2, 2))
    found = index_scores(
        query, weights, jnp.asarray([1]), jnp.asarray([0]), jnp.zeros((1, 1), jnp.int32), plane, None,
        index_format="float", score_dtype=jnp.bfloat16,
    )  # fmt: skip
    exact = index_scores(
        query, weights, jnp.asarray([1]), jnp.asarray([0]), jnp.zeros((1, 1), jnp.int32), plane, None,
        index_format="float",
    )  # fmt: skip
    assert float(exact[0, 0]) == 1 + 2**-7 + 2**-8
    assert float(found[0, 0]) == 1 + 2**-6  # 1 + 1.5 * 2^-7 lies between two bfloat16 numbers, the even one wins


def test_an_unquantized_query_is_scored_as_it_is():
    case = index_case(7, index_format="fp8", rows=6, requests=2, columns=2)
    expected = scores_oracle(case)
    free = index_scores(*case.arrays, index_format="fp8", quantize_query=False)
    keys = case.decoded[case.block_tables[case.batch_ids[2]]].reshape(-1, 64)
    exact = case.head_weights[2].astype(np.float64) @ np.maximum(case.query[2].astype(np.float64) @ keys.T, 0)
    np.testing.assert_allclose(free[2], exact, rtol=0, atol=1e-5 * np.abs(exact).max())
    assert np.abs(np.asarray(free[2]) - expected[2]).max() > 1e-3 * np.abs(expected[2]).max()


def test_an_empty_batch_has_no_scores():
    case = index_case(8, index_format="fp8", rows=4, requests=2, columns=2, padding=4)
    assert np.isneginf(index_scores(*case.arrays, index_format="fp8")).all()


def test_all_faults_of_the_plane_are_named_together():
    case = index_case(9, index_format="fp8", rows=4, requests=2, columns=2)
    with pytest.raises(ValueError, match=r"values are .*not \[pages, rows, 32\].*; scales are float32"):
        index_scores(*case.arrays, index_format="fp4")
    with pytest.raises(ValueError, match="index_format 'int8' is none of float, fp8, fp4"):
        index_scores(*case.arrays, index_format="int8")


def test_asking_for_an_unknown_implementation_is_an_error():
    case = index_case(9, index_format="fp8", rows=4, requests=2, columns=2)
    with pytest.raises(ValueError, match="'mosaic' is none of auto, xla, pallas"):
        index_scores(*case.arrays, index_format="fp8", implementation="mosaic")


def test_pallas_where_no_kernel_runs_is_one_named_error():
    case = index_case(9, index_format="float", rows=4, requests=2, columns=2)
    with pytest.raises(backend.KernelUnsupportedError, match="index_scores: no Pallas kernel"):
        index_scores(*case.arrays, index_format="float", implementation="pallas")
