"""Every implementation of `grouped_experts` against an oracle that walks rows and experts one at a time."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import backend
from pallas_kernels.backend import KernelUnsupportedError
from pallas_kernels.grouped_experts import (
    ExpertWeights,
    blocks,
    dense,
    grouped_experts,
    tpu,
    triton,
    triton_many,
    triton_pairs,
    xla,
)
from pallas_kernels.grouped_experts.triton_parts import operand_of
from pallas_kernels.grouped_experts.xla import row_tile
from tests.pallas_kernels.expert_oracle import expert_case, experts_oracle, rounded
from v41jax import quantization_numpy as quantization


def run(case, *, dequantized=None, swiglu_limit=10.0, quantize_hidden=True, **options):
    call = functools.partial(grouped_experts, swiglu_limit=swiglu_limit, quantize_hidden=quantize_hidden, **options)
    return np.asarray(jax.jit(call)(*case.arrays(dequantized), valid=jnp.asarray(case.valid)))


def assert_meaning(found, case, *, swiglu_limit=10.0, quantize_hidden=True):
    expected = experts_oracle(case, swiglu_limit=swiglu_limit, quantize_hidden=quantize_hidden)
    assert found.dtype == np.float32
    assert not found[~case.valid].any()
    # A hidden value on the other side of a rounding boundary moves a row: bound the rows' error, not each element.
    limit = 2.0**-7 if case.x.dtype != np.float32 else 1e-2 if quantize_hidden else 1e-5
    error = np.linalg.norm(found - expected, axis=1)
    assert (error <= limit * np.linalg.norm(expected, axis=1)).all()
    if case.x.dtype == np.float32:
        assert np.median(error / np.maximum(np.linalg.norm(expected, axis=1), 1e-30)) < 1e-5


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("dequantized", [None, jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("rows", "experts", "chosen"), [(1, 16, 6), (9, 4, 2), (40, 5, 3)])
def test_experts_equal_the_oracle(dtype, dequantized, rows, experts, chosen):
    case = expert_case(rows, rows=rows, experts=experts, chosen=chosen, dtype=dtype, padding=rows // 4)
    assert_meaning(run(case, dequantized=dequantized), case)


@pytest.mark.parametrize("options", [{"swiglu_limit": 0.0}, {"swiglu_limit": 0.5}, {"quantize_hidden": False}])
def test_clamp_and_quantizer_can_be_switched(options):
    case = expert_case(1, rows=6, experts=4, chosen=2)
    assert_meaning(run(case, **options), case, **options)


def test_every_row_on_one_expert_is_several_tiles():
    case = expert_case(2, rows=30, experts=8, chosen=1)
    assert row_tile(30, 8) < 30
    case.expert_ids[:] = case.expert_ids[0]
    assert_meaning(run(case), case)


def test_ids_held_elsewhere_contribute_nothing():
    case = expert_case(3, rows=8, experts=4, chosen=3, poison_unused=False)
    case.expert_ids[::2, 1] = 4
    case.expert_ids[1::2, 0] = -1
    assert_meaning(run(case), case)


@pytest.mark.parametrize("layer", [0, 2])
def test_one_layer_of_a_stack_is_that_layer_alone(layer):
    cases = [expert_case(seed, rows=12, experts=4, chosen=2, poison_unused=False) for seed in (6, 7, 8)]
    alone = run(cases[layer], implementation="xla")
    x, ids, routing, *_ = cases[layer].arrays(None)
    ids = ids.at[3, 1].set(4).at[4, 0].set(-1)
    stacks = jax.tree.map(lambda *parts: jnp.stack(parts), *(case.arrays(None)[3:] for case in cases))
    call = functools.partial(grouped_experts, swiglu_limit=10.0, quantize_hidden=True, implementation="xla")
    found = np.asarray(call(x, ids, routing, *stacks, valid=jnp.asarray(cases[layer].valid), layer=jnp.int32(layer)))
    kept = [row for row in range(12) if row not in (3, 4)]
    np.testing.assert_array_equal(found[kept], alone[kept])
    cases[layer].expert_ids[3, 1], cases[layer].expert_ids[4, 0] = 4, -1
    np.testing.assert_array_equal(found, run(cases[layer], implementation="xla"))


def test_rows_do_not_depend_on_their_neighbours():
    case = expert_case(4, rows=24, experts=6, chosen=2, poison_unused=False)
    whole = run(case, quantize_hidden=False)
    for count in (1, 5):
        for name in ("x", "expert_ids", "weights", "valid"):
            setattr(case, name, getattr(case, name)[:count])
        np.testing.assert_allclose(run(case, quantize_hidden=False), whole[:count], rtol=1e-5, atol=1e-6)
        case = expert_case(4, rows=24, experts=6, chosen=2, poison_unused=False)


@pytest.mark.parametrize("quantize_hidden", [False, True])
def test_few_rows_on_most_experts_give_what_the_loop_gives(quantize_hidden):
    case = expert_case(9, rows=8, experts=6, chosen=2, padding=2)
    case.expert_ids[0, 1], case.expert_ids[3, 0] = 6, -1
    assert dense.pays(*case.expert_ids.shape, 6)
    x, ids, routing, *matrices = case.arrays(jnp.float32)
    valid, options = jnp.asarray(case.valid), {"swiglu_limit": 0.5, "quantize_hidden": quantize_hidden}
    stacks = [jnp.stack([jnp.full_like(matrix, jnp.nan), matrix]) for matrix in matrices]
    made = grouped_experts(x, ids, routing, *stacks, valid=valid, layer=jnp.int32(1), **options)
    expected = xla.grouped_experts(x, ids, routing, *matrices, valid=valid, **options)
    np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-5)


def test_no_valid_row_reads_no_expert():
    case = expert_case(5, rows=0, experts=4, chosen=2, padding=3)
    assert not run(case).any()


def run_on_gpu(case, config=None, *, swiglu_limit=10.0, quantize_hidden=True):
    call = functools.partial(
        triton.grouped_experts,
        swiglu_limit=swiglu_limit,
        quantize_hidden=quantize_hidden,
        config=config,
        interpret=True,
    )
    return np.asarray(jax.jit(call)(*case.arrays(), valid=jnp.asarray(case.valid)))


SMALL_TILES = triton.Config(16, triton.Tile(64, 16, 4, 1), triton.Tile(32, 16, 4, 1))
MANY_TILES = triton_many.ManyConfig(32, 16, 64, 16, 4, 1)


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("tiles", [SMALL_TILES, MANY_TILES])
@pytest.mark.parametrize("options", [{}, {"swiglu_limit": 0.0, "quantize_hidden": False}])
def test_gpu_kernel_equals_the_oracle(rows, tiles, options):
    case = expert_case(rows, rows=rows, experts=5, chosen=3, width=192, hidden=128, dtype=jnp.bfloat16, padding=2)
    assert_meaning(run_on_gpu(case, tiles, **options), case, **options)


def test_kernel_of_many_rows_reads_one_layer_of_a_stack():
    case = expert_case(4, rows=20, experts=6, chosen=2, width=192, hidden=64, dtype=jnp.bfloat16, padding=1)
    x, ids, routing, *matrices = case.arrays()
    stacks = jax.tree.map(lambda part: jnp.stack([jnp.full_like(part, 255), part]), matrices)
    joined = jax.tree.map(lambda part: part.reshape(-1, *part.shape[2:]), stacks)
    options = {"swiglu_limit": 10.0, "quantize_hidden": True, "valid": jnp.asarray(case.valid)}
    found = triton.grouped_experts(
        x, ids, routing, *joined, layers=2, layer=jnp.int32(1), config=MANY_TILES, interpret=True, **options
    )
    assert_meaning(np.asarray(found), case)


@pytest.mark.parametrize(("rows", "of_block"), [(384, 32), (512, 64), (1024, 64), (4096, 128)])
def test_many_rows_an_expert_take_a_kernel_of_their_own(rows, of_block):
    config = triton.config_for(rows * 6, 96, 5120, 2304, "cuda")
    assert isinstance(config, triton_many.ManyConfig) and config.rows == of_block
    assert 5120 % config.outputs == 0 == 2304 % config.outputs and 2304 // 4 % config.inner == 0


@pytest.mark.parametrize("parts", [1, 2, 8])
@pytest.mark.parametrize("options", [{}, {"swiglu_limit": 0.0, "quantize_hidden": False}])
def test_kernel_of_single_pairs_adds_the_parts_of_a_row(parts, options):
    tile = triton_pairs.PairTile(32, parts, 16, 4, 1)
    tiles = triton_pairs.PairConfig(8, tile, dataclasses.replace(tile, parts=1))
    case = expert_case(4, rows=4, experts=5, chosen=3, width=512, hidden=192, dtype=jnp.bfloat16, padding=1)
    case.expert_ids[1] = [-1, 2, 5]
    assert_meaning(run_on_gpu(case, tiles, **options), case, **options)


def test_kernel_of_single_pairs_reads_one_layer_of_a_stack_and_the_row_alone():
    case = expert_case(4, rows=3, experts=6, chosen=2, width=256, hidden=192, dtype=jnp.bfloat16, padding=1)
    x, ids, routing, *matrices = case.arrays()
    stacks = jax.tree.map(lambda part: jnp.stack([jnp.full_like(part, 255), part]), matrices)
    joined = jax.tree.map(lambda part: part.reshape(-1, *part.shape[2:]), stacks)
    options = {"swiglu_limit": 10.0, "quantize_hidden": True, "valid": jnp.asarray(case.valid)}
    call = functools.partial(triton.grouped_experts, layers=2, layer=jnp.int32(1), interpret=True, **options)
    found = np.asarray(call(x, ids, routing, *joined))
    assert_meaning(found, case)
    others = np.asarray(call(x.at[0].set(jnp.nan), ids, routing, *joined))
    np.testing.assert_array_equal(others[1:], found[1:])


@pytest.mark.parametrize("generation", ["cuda", "rocm"])
@pytest.mark.parametrize("rows", [1, 2])
def test_very_few_pairs_are_blocks_of_their_own(rows, generation):
    config = triton.config_for(rows * 6, 96, 5120, 2304, generation)
    assert isinstance(config, triton_pairs.PairConfig)
    for tile, inputs in ((config.hidden, 5120), (config.down, 2304)):
        assert tile.parts <= config.columns and inputs // 4 // tile.parts % max(32, tile.inner) == 0


@pytest.mark.parametrize(("rows", "of_block"), [(3, 8), (8, 8), (64, 8), (128, 16), (256, 16)])
def test_few_rows_an_expert_take_blocks_that_hold_nearly_all_of_them(rows, of_block):
    config = triton.config_for(rows * 6, 96, 5120, 2304, "cuda")
    assert isinstance(config, triton.Config) and config.rows == of_block
    assert triton.config_for(rows * 6, 96, 5120, 2304, "rocm").rows >= 16
    assert isinstance(triton.config_for(512 * 6, 96, 5120, 2304, "rocm"), triton.Config)


@pytest.mark.parametrize("rows", [1, 16, 17, 32, 33, 70])
def test_blocks_of_few_rows_take_a_smaller_product(rows):
    case = expert_case(
        rows, rows=rows, experts=2, chosen=1, width=64, hidden=64, dtype=jnp.bfloat16, padding=1, poison_unused=False
    )
    case.expert_ids[:] = 1
    assert_meaning(run_on_gpu(case, MANY_TILES), case)


@pytest.mark.parametrize("pairs", [18, 48, 384, 1440])
def test_tiles_of_the_release_divide_its_widths(pairs):
    config = triton.config_for(pairs, 96, 5120, 2304, "cuda")
    assert 5120 // 4 % config.hidden.inner == 0 == 2304 // 4 % config.down.inner
    assert 2304 % config.hidden.outputs == 0 == 5120 % config.down.outputs


@pytest.mark.parametrize("tiles", [SMALL_TILES, MANY_TILES])
def test_rows_of_no_block_are_neither_read_nor_written(tiles):
    """Blocks are rarely full: what lies where their spare rows point must not matter."""
    case = expert_case(8, rows=3, experts=3, chosen=1, width=192, hidden=64, dtype=jnp.bfloat16, padding=0)
    case.expert_ids[:, 0] = [0, 2, 2]
    alone = run_on_gpu(case, tiles)
    case.x[0] = np.nan
    np.testing.assert_array_equal(run_on_gpu(case, tiles)[1:], alone[1:])


def test_gpu_kernel_reads_rows_that_are_in_its_order():
    case = expert_case(2, rows=5, experts=4, chosen=2, hidden=64, dtype=jnp.bfloat16)
    x, *others = case.arrays()
    call = functools.partial(grouped_experts, swiglu_limit=10.0, quantize_hidden=True, implementation="pallas")
    ordered = jax.jit(call)(
        x * jnp.nan, *others, valid=jnp.asarray(case.valid), codes=operand_of(x, "released", cuda=False)
    )
    assert_meaning(np.asarray(ordered), case)


def test_gpu_kernel_orders_many_pairs_by_sorting(monkeypatch):
    monkeypatch.setattr(blocks, "MOST_COMPARED", 0)
    case = expert_case(6, rows=20, experts=7, chosen=2, hidden=64, dtype=jnp.bfloat16, padding=1)
    case.expert_ids[:5, 0] = 9
    assert_meaning(run_on_gpu(case, SMALL_TILES), case)


@settings(max_examples=5)
@given(st.integers(0, 30), st.integers(1, 8), st.integers(1, 3), st.integers(0, 3))
def test_gpu_kernel_of_any_shape_through_the_public_call(rows, experts, chosen, padding):
    case = expert_case(
        rows, rows=rows, experts=experts + 2, chosen=chosen, hidden=64, dtype=jnp.bfloat16, padding=padding
    )
    assert_meaning(run(case, implementation="pallas"), case)


def test_inner_widths_of_the_gpu_kernel_are_whole_steps():
    case = expert_case(1, rows=2, experts=3, chosen=1, hidden=32, dtype=jnp.bfloat16)
    with pytest.raises(KernelUnsupportedError, match="32 inner dims are not a multiple of 64"):
        run(case, implementation="pallas")


def test_dequantized_experts_have_no_kernel_and_say_so():
    case = expert_case(1, rows=2, experts=3, chosen=1, dtype=jnp.bfloat16)
    with pytest.raises(KernelUnsupportedError, match="dequantized"):
        run(case, dequantized=jnp.bfloat16, implementation="pallas")


def run_on_tpu(case, **options):
    options = {"swiglu_limit": 10.0, "quantize_hidden": True, **options}
    call = functools.partial(tpu.grouped_experts, **options, interpret=True)
    return np.asarray(jax.jit(call)(*case.arrays(), valid=jnp.asarray(case.valid)))


IMPLEMENTATIONS = {
    "xla": functools.partial(run, implementation="xla"),
    "every expert": functools.partial(run, dequantized=jnp.bfloat16, implementation="xla"),
    "gpu": functools.partial(run_on_gpu, config=SMALL_TILES),
    "gpu, many rows": functools.partial(run_on_gpu, config=MANY_TILES),
    "tpu": run_on_tpu,
}


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_hidden_values_that_are_no_numbers_are_quantized_as_the_codec_does(name):
    """Row 0 overflows in one hidden value: its group is that infinity and zeros. Row 1 is NaN, row 2 is subnormal."""
    case = expert_case(1, rows=4, experts=2, chosen=1, width=64, hidden=64, dtype=jnp.bfloat16, poison_unused=False)
    assert dense.pays(*case.expert_ids.shape, 2)
    # Gate and up: six in the even columns of hidden value 5, one in the odd columns of the others.
    only = np.full((2, 64, 32), 0x20, np.uint8)
    only[:, 5] = 0x07
    ones = [ExpertWeights(jnp.asarray(only), jnp.full((2, 64, 2), 127, jnp.uint8))] * 2
    ones.append(ExpertWeights(jnp.full((2, 64, 32), 0x22, jnp.uint8), jnp.full((2, 64, 2), 127, jnp.uint8)))
    decoded = tuple(quantization.dequantize_expert(np.asarray(part), np.asarray(scales)) for part, scales in ones)
    x = np.zeros_like(case.x)
    x[0, 0], x[1:, 1] = 1e30, 1.0
    case = dataclasses.replace(case, x=x, stored=tuple(ones), decoded=decoded)
    case.weights[:, 0] = [1.0, np.nan, 1e-39, 1.0]
    values = IMPLEMENTATIONS[name](case, swiglu_limit=0.0)
    one = np.float32(quantization.fake_q8(np.full(32, 1 / (1 + np.exp(-1.0)), np.float32))[0])
    np.testing.assert_array_equal(values[:3, 0], [np.inf, np.nan, 0.0])
    np.testing.assert_allclose(values[3], 63 * one, rtol=2.0**-8)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_values_at_the_clamps_and_those_that_are_no_numbers(name):
    """Gate and up of a row are the same in all hidden values: twice its first and second element. Those of the second
    expert's gate and of the third one's up are NaN."""
    case = expert_case(1, rows=10, experts=3, chosen=1, width=64, hidden=64, dtype=jnp.bfloat16, poison_unused=False)
    assert dense.pays(*case.expert_ids.shape, 3)
    codes = np.zeros((2, 3, 64, 32), np.uint8)
    codes[:, :, :, 0] = np.array([0x04, 0x40])[:, None, None]
    scales = np.full((2, 3, 64, 2), 127, np.uint8)
    scales[0, 1], scales[1, 2] = 255, 255
    stored = [ExpertWeights(jnp.asarray(part), jnp.asarray(own)) for part, own in zip(codes, scales, strict=True)]
    stored.append(ExpertWeights(jnp.full((3, 64, 32), 0x22, jnp.uint8), jnp.full((3, 64, 2), 127, jnp.uint8)))
    decoded = tuple(quantization.dequantize_expert(np.asarray(part), np.asarray(own)) for part, own in stored)
    x = np.zeros_like(case.x)
    # At the clamps, past them, a negative gate, infinities of both (-inf * 0 is NaN), then NaN of either.
    x[:, 0] = [5, 6, 6, -2, 3e38, 1, 1, -3e38, 1, 6]
    x[:, 1] = [-5, 6, -6, 6, 1, 3e38, -3e38, 1, 6, 6]
    case = dataclasses.replace(case, x=x, stored=tuple(stored), decoded=decoded)
    case.expert_ids[:, 0] = [0] * 8 + [1, 2]
    case.weights[:] = 1
    silu = np.array([10, 10, 10, -4, 10, 2, 2]) / (1 + np.exp(-np.array([10.0, 10, 10, -4, 10, 2, 2])))
    hidden = np.array([*(silu * [-10, 10, -10, 10, 2, 10, -10]), np.nan, np.nan, np.nan])
    for quantize_hidden in (False, True):
        values = IMPLEMENTATIONS[name](case, quantize_hidden=quantize_hidden)
        made = rounded(hidden, jnp.bfloat16)
        made = quantization.fake_q8(np.repeat(made[:, None], 32, axis=1))[:, 0] if quantize_hidden else made
        np.testing.assert_allclose(values, np.repeat(64 * made[:, None], 64, axis=1), rtol=2.0**-7)


@pytest.mark.parametrize("rows", [3, 40])
def test_tpu_kernel_equals_the_oracle(rows):
    options = {"swiglu_limit": 0.0, "quantize_hidden": False} if rows == 40 else {}
    case = expert_case(rows, rows=rows, experts=5, chosen=3, width=96, hidden=64, dtype=jnp.bfloat16, padding=2)
    assert_meaning(run_on_tpu(case, **options), case, **options)


def test_tpu_kernel_walks_tiles_and_steps(monkeypatch):
    monkeypatch.setattr(tpu, "MOST_INNER", 128)
    case = expert_case(7, rows=2, experts=3, chosen=2, width=512, hidden=320, dtype=jnp.bfloat16)
    assert_meaning(run_on_tpu(case), case)


def test_tpu_kernel_cuts_a_crowded_expert_into_blocks(monkeypatch):
    monkeypatch.setattr(tpu, "MOST_ROWS", 16)
    case = expert_case(2, rows=40, experts=4, chosen=2, dtype=jnp.bfloat16, padding=1)
    case.expert_ids[:, 0], case.expert_ids[:, 1] = 2, 9
    case.expert_ids[:7, 1] = 0
    assert_meaning(run_on_tpu(case), case)


@settings(max_examples=3)
@given(st.integers(0, 30), st.integers(1, 8), st.integers(1, 3), st.integers(0, 3))
def test_tpu_kernel_of_any_shape_through_the_public_call(rows, experts, chosen, padding):
    case = expert_case(rows, rows=rows, experts=experts + 2, chosen=chosen, dtype=jnp.bfloat16, padding=padding)
    with backend.use_target(backend.Target("tpu", "cpu", interpret=True)):
        assert_meaning(run(case, implementation="pallas"), case)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.sampled_from([1, 4, 16]), st.integers(0, 2))
def test_every_served_pair_has_one_place_in_a_block_of_its_expert(ids, rows, layer):
    ids = [expert + 5 * layer if expert < 5 else 15 for expert in ids]
    blocks = tpu.blocks_of(jnp.asarray(ids, jnp.int32), 15, rows, layers=3)
    assert len(blocks.expert) <= 5 + len(ids) // rows, "as many as one layer's experts may need"
    served = [pair for pair, expert in enumerate(ids) if expert < 15]
    places = np.asarray(blocks.place)[served]
    assert len(set(places.tolist())) == len(served) and (places < int(blocks.used) * rows).all()
    assert [ids[pair] for pair in served] == np.asarray(blocks.expert)[places // rows].tolist()
    assert np.asarray(blocks.pair)[places].tolist() == served
    assert int(blocks.used) == sum(-(-ids.count(expert) // rows) for expert in range(15)) <= len(blocks.expert)


def test_a_tpu_takes_the_kernel_and_reads_a_stack_of_layers_in_place():
    case = expert_case(1, rows=2, experts=3, chosen=1, dtype=jnp.bfloat16)
    x, ids, routing, *matrices = case.arrays()
    stacks = jax.tree.map(lambda part: jnp.stack([part] * 2), matrices)
    call = functools.partial(grouped_experts, swiglu_limit=10.0, quantize_hidden=True, valid=jnp.asarray(case.valid))
    with backend.use_target(backend.Target("tpu", "v5p")):
        traced = str(jax.make_jaxpr(lambda *a: call(*a, layer=1))(x, ids, routing, *stacks))
    assert "pallas_call" in traced and "dynamic_slice" not in traced.split("pallas_call")[0]
    assert "2080 inner dims" in tpu.unsupported(x, *[ExpertWeights(jnp.zeros((1, 32, 1040), jnp.uint8), None)] * 2)


@pytest.mark.parametrize("name", [-1, 5])
def test_a_pair_held_elsewhere_runs_no_program(name):
    """Its place keeps what was there, which interpret mode makes NaN: nothing was read for it either."""
    case = expert_case(1, rows=2, experts=5, chosen=2, width=128, hidden=64, dtype=jnp.bfloat16)
    case.expert_ids[0, 1] = name
    x, ids, routing, *matrices = case.arrays()
    found = triton_pairs.expert_outputs(
        x, routing.reshape(-1), ids, jnp.asarray(case.valid), matrices, experts=5, layer=0, codes=None, cuda=False,
        config=triton_pairs.config_for(128, 64, "cuda"), swiglu_limit=10.0, quantize_hidden=True, interpret=True,
    )  # fmt: skip
    assert np.isnan(np.asarray(found, np.float32)).all(axis=1).tolist() == [False, True, False, False]
