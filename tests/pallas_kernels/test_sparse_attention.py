"""Every implementation of `sparse_attention` against float64, on ragged rows with poisoned unused memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.backend import KernelUnsupportedError
from pallas_kernels.rotation import rotate
from pallas_kernels.sparse_attention import sparse_attention, triton, xla
from pallas_kernels.sparse_attention.row_math import shares
from tests.pallas_kernels.attention_oracle import AttentionCase, attention_case, attention_oracle, relative_error

FORMATS = [("bf16", "bf16"), ("float", "float"), ("fp4", "fp8"), ("bf16", "fp8")]
LIMIT = {jnp.float32: 1e-6, jnp.bfloat16: 3e-3}


def attend(case, **options):
    return jax.jit(functools.partial(sparse_attention, **case.options, **options))(*case.arrays)


def assert_meaning(case, dtype, **options):
    found = attend(case, **options)
    assert found.dtype == dtype and found.shape == case.arrays[0].shape
    expected = attention_oracle(case)
    assert relative_error(found, expected) < LIMIT[dtype]
    padding = np.asarray(case.arrays[6]) < 0
    assert not np.asarray(found, np.float32)[padding].any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("rows", [1, 40])
def test_attention_equals_float64_whatever_unused_memory_holds(dtype, formats, rows):
    main_format, window_format = formats
    case = attention_case(
        rows, rows=rows, main_format=main_format, window_format=window_format, dtype=dtype, padding=2 * (rows > 1)
    )
    assert_meaning(case, dtype)


def test_decode_reads_every_window_row_from_the_ring():
    assert_meaning(attention_case(3, rows=9, fresh_rows=False, padding=1), jnp.float32)


def test_layers_with_a_window_only_need_no_plane():
    assert_meaning(attention_case(4, rows=7, selected=0), jnp.float32)


@pytest.mark.parametrize("spread", [0.0, 60.0, 300.0])
def test_large_sinks_overflow_to_the_right_limit(spread):
    assert_meaning(attention_case(5, rows=6, heads=8, sink_spread=spread), jnp.float32)


def test_a_position_in_both_lists_counts_twice():
    width = 32
    row = np.random.default_rng(0).normal(size=width).astype(np.float32)
    other = -row
    ring = jnp.asarray(np.stack([row, other]))[None]
    query = jnp.zeros((1, 1, width))
    zero = jnp.zeros(1, jnp.int32)
    out = jax.jit(functools.partial(
        sparse_attention, window=2, scale=1.0, main_format="float", window_format="float"
    ))(
        query, jnp.full(1, -jnp.inf), zero[None], zero + 1, jnp.asarray(row)[None, None], zero[None], zero, zero, ring,
        jnp.zeros((0, width)), zero + 1, zero, zero + 2, zero, jnp.ones((1, 4)), jnp.zeros((1, 4)),
    )  # fmt: skip
    np.testing.assert_allclose(out[0, 0], row / 3, rtol=1e-6)


def test_packed_rows_equal_bfloat16_rows_to_the_bit():
    packed = attention_case(6, rows=12, main_format="fp4", window_format="fp8", dtype=jnp.bfloat16)
    plain = attention_case(6, rows=12, main_format="bf16", window_format="bf16", dtype=jnp.bfloat16)
    np.testing.assert_array_equal(attend(packed), attend(plain))


def test_a_tile_of_query_rows_bounds_the_gathered_rows(monkeypatch):
    case = attention_case(7, rows=21)
    whole = attend(case)
    monkeypatch.setattr(xla, "QUERY_TILE", 4)
    np.testing.assert_allclose(attend(case), whole, rtol=0, atol=1e-6)
    text = jax.jit(lambda *x: sparse_attention(*x, **case.options)).lower(*case.arrays).as_text()
    assert "tensor<21x8x64xf32>" not in text and "tensor<4x8x64xf32>" in text


def test_probabilities_are_rounded_for_the_value_product_only():
    # Two keys of weight 1 and exp(-1): the value product sees bfloat16(exp(-1)), the denominator does not.
    width = 32
    keys = np.zeros((2, width), np.float32)
    keys[0, 0], keys[1, 0], keys[1, 1] = 1, 0, 1
    query = np.zeros((1, 1, width), np.float32)
    query[..., 0] = 1
    zero = jnp.zeros(1, jnp.int32)
    out = jax.jit(functools.partial(
        sparse_attention, window=2, scale=1.0, main_format="float", window_format="float"
    ))(
        jnp.asarray(query, jnp.bfloat16), jnp.full(1, -1e4), jnp.zeros((1, 0), jnp.int32), zero, None, zero[None],
        zero, zero, jnp.asarray(keys, jnp.bfloat16)[None], jnp.zeros((0, width), jnp.bfloat16), zero + 1, zero,
        zero + 2, zero, jnp.ones((1, 2)), jnp.zeros((1, 2)),
    )  # fmt: skip
    weight = np.exp(np.float32(-1))
    rounded = np.float32(jnp.bfloat16(weight))
    assert float(out[0, 0, 1]) == float(jnp.bfloat16(rounded / (1 + weight)))


def test_the_rotation_reads_the_rounded_quotient():
    case = attention_case(8, rows=5, dtype=jnp.bfloat16)
    still = [*case.arrays[:14], jnp.ones_like(case.arrays[14]), jnp.zeros_like(case.arrays[15])]
    unrotated = attend(AttentionCase(still, case.options, case.rows))
    np.testing.assert_array_equal(attend(case), rotate(unrotated, case.arrays[14], -case.arrays[15]))


def test_an_unknown_format_is_named():
    case = attention_case(9, rows=1)
    case.options["main_format"] = "fp8"
    with pytest.raises(ValueError, match="'fp8'"):
        attend(case)


TRITON_CONFIGS = [
    triton.Config(keys=16, heads=16, parts=1, splits=1, num_warps=4, num_stages=1),
    triton.Config(keys=16, heads=32, parts=2, splits=3, num_warps=4, num_stages=1),
    triton.Config(keys=16, heads=16, parts=1, splits=6, num_warps=4, num_stages=1, joined=1),
    triton.Config(keys=16, heads=16, parts=2, splits=1, num_warps=4, num_stages=1, apart=True),
]


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_a_query_is_rotated_and_rings_and_sinks_are_found_in_their_stacks(implementation):
    case = attention_case(12, rows=5, heads=20, padding=1, main_format="bf16", window_format="bf16", dtype=jnp.bfloat16)
    query, sink, *rest = case.arrays
    rotated = attend(
        dataclasses.replace(case, arrays=[rotate(query, *rest[12:]), sink, *rest]), implementation=implementation
    )
    rings = jnp.concatenate([jnp.full_like(rest[6], jnp.nan)] * 2 + [rest[6]])
    stacked = dataclasses.replace(
        case, arrays=[query, jnp.stack([sink + 1, sink, sink - 1]), *rest[:6], rings, *rest[7:]]
    )
    found = attend(stacked, implementation=implementation, layer=1, ring_offset=2 * rest[6].shape[0], rotate_query=True)
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(rotated, np.float32))


def attend_on_gpu(case, config=None):
    run = functools.partial(triton.sparse_attention, **case.options, config=config, interpret=True)
    return jax.jit(run)(*case.arrays)


@pytest.mark.parametrize("config", TRITON_CONFIGS)
@pytest.mark.parametrize("formats", FORMATS[1:])
def test_gpu_kernel_equals_float64_whatever_unused_memory_holds(config, formats):
    main_format, window_format = formats
    case = attention_case(
        11, rows=5, heads=20, selected=40, page_rows=16, columns=4, window=24, ring=30, padding=2,
        main_format=main_format, window_format=window_format, dtype=jnp.bfloat16,
    )  # fmt: skip
    found = attend_on_gpu(case, config)
    assert relative_error(found, attention_oracle(case)) < LIMIT[jnp.bfloat16]
    assert not np.asarray(found, np.float32)[5:].any()


def test_gpu_kernel_reads_packed_rows_as_their_bfloat16_values():
    packed = attention_case(6, rows=4, main_format="fp4", window_format="fp8", dtype=jnp.bfloat16)
    plain = attention_case(6, rows=4, main_format="bf16", window_format="bf16", dtype=jnp.bfloat16)
    np.testing.assert_array_equal(attend_on_gpu(packed, TRITON_CONFIGS[0]), attend_on_gpu(plain, TRITON_CONFIGS[0]))


@pytest.mark.parametrize("options", [{"selected": 0}, {"fresh_rows": False}, {"sink_spread": 300.0}])
def test_gpu_kernel_with_missing_lists_and_large_sinks(options):
    case = attention_case(12, rows=3, dtype=jnp.bfloat16, **options)
    assert relative_error(attend_on_gpu(case, TRITON_CONFIGS[1]), attention_oracle(case)) < LIMIT[jnp.bfloat16]


@settings(max_examples=6)
@given(
    st.integers(1, 4), st.integers(1, 3), st.integers(1, 20), st.integers(0, 20), st.integers(1, 20), st.integers(0, 9)
)
def test_gpu_kernel_of_any_shape(rows, requests, heads, selected, window, seed):
    case = attention_case(
        seed, rows=rows, requests=requests, heads=heads, selected=selected, window=window, ring=window + 2,
        columns=6, main_format="fp4", window_format="fp8", dtype=jnp.bfloat16, padding=1,
    )  # fmt: skip
    assert relative_error(attend_on_gpu(case, TRITON_CONFIGS[1]), attention_oracle(case)) < LIMIT[jnp.bfloat16]


def test_the_public_call_takes_the_kernel_when_asked_and_names_what_it_cannot_do():
    case = attention_case(13, rows=2, dtype=jnp.bfloat16)
    assert relative_error(attend(case, implementation="pallas"), attention_oracle(case)) < LIMIT[jnp.bfloat16]
    with pytest.raises(KernelUnsupportedError, match="float32"):
        attend(attention_case(13, rows=2), implementation="pallas")


@pytest.mark.parametrize("generation", ["cuda", "rocm"])
@pytest.mark.parametrize(("rows", "splits"), [(1, 20), (64, 2), (4096, 1)])
def test_few_query_rows_are_cut_among_programs(generation, rows, splits):
    assert triton.config_for(rows, 64, 512, 640, generation).splits == splits


@given(st.lists(st.integers(0, 300), min_size=1, max_size=3), st.sampled_from([16, 64]), st.integers(1, 12))
def test_every_tile_of_the_lists_is_in_the_share_of_one_split(counts, keys, splits):
    tiles = [-(-count // keys) for count in counts]
    taken = [[] for _ in counts]
    for split in range(splits):
        own = 0
        for tile, (first, last) in zip(taken, shares(list(map(jnp.int32, counts)), keys, split, splits), strict=True):
            tile += range(int(first), int(last))
            own += int(last) - int(first)
        assert own <= -(-sum(tiles) // splits)
    assert taken == [list(range(count)) for count in tiles]
