"""`grouped_experts` with arranged weights: what reads them gives what it gives for released ones."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backend
from pallas_kernels.backend import KernelUnsupportedError
from pallas_kernels.grouped_experts import (
    ExpertWeights,
    grouped_experts,
    reads_arranged,
    triton,
    triton_many,
    triton_pairs,
)
from pallas_kernels.grouped_experts.arrangement import BLOCK_DIMS, arranged
from pallas_kernels.grouped_experts.triton_parts import operand_of
from tests.pallas_kernels.expert_oracle import expert_case
from tests.pallas_kernels.test_grouped_experts import assert_meaning, run, run_on_gpu
from v41jax import quantization_numpy as quantization

HALF_BLOCKS = triton.Config(16, triton.Tile(64, 16, 4, 1), triton.Tile(32, 16, 4, 1))
BLOCKS = triton.Config(16, triton.Tile(32, 32, 2, 1), triton.Tile(64, 32, 2, 1))
MANY = triton_many.ManyConfig(32, 16, 64, 16, 4, 1)
MANY_BLOCKS = triton_many.ManyConfig(16, 16, 32, 32, 4, 1)
MIXED = triton.Config(16, triton.Tile(64, 32, 4, 1), triton.Tile(32, 16, 4, 1))
PAIRS = triton_pairs.PairConfig(8, triton_pairs.PairTile(32, 2, 32, 4, 1), triton_pairs.PairTile(64, 1, 16, 2, 1))


def in_order(case, matrices=(0, 1, 2)):
    """The case with these of its matrices arranged, where their inner widths allow."""

    def moved(weight):
        return weight if weight.inputs % BLOCK_DIMS else weight._replace(packed=arranged(weight.packed))

    stored = tuple(moved(weight) if place in matrices else weight for place, weight in enumerate(case.stored))
    return dataclasses.replace(case, stored=stored)


def exact_case(seed, **sizes):
    """Sums of small integers first, one product an output then: no order of a sum changes a bit."""
    case = expert_case(seed, dtype=jnp.bfloat16, **sizes)
    random = np.random.default_rng(seed)
    x = np.where(case.valid[:, None], random.integers(-2, 3, case.x.shape), np.nan).astype(case.x.dtype)
    stored = [ExpertWeights(weight.packed, jnp.where(weight.scales == 255, 255, 127)) for weight in case.stored[:2]]
    down = case.stored[2]
    outputs = down.packed.shape[1]
    chosen = np.arange(outputs) * 37 % down.inputs
    codes = np.zeros((down.packed.shape[0], outputs, down.inputs), np.uint8)
    codes[:, np.arange(outputs), chosen] = random.integers(1, 16, (len(codes), outputs))
    stored.append(ExpertWeights(jnp.asarray(quantization.pack_nibbles(codes)), down.scales))
    decoded = tuple(quantization.dequantize_expert(*map(np.asarray, weight)) for weight in stored)
    return dataclasses.replace(case, x=x, stored=tuple(stored), decoded=decoded)


@pytest.mark.parametrize(
    ("rows", "width", "hidden", "tiles"),
    [
        (40, 256, 128, HALF_BLOCKS),
        (3, 256, 128, BLOCKS),
        (4, 256, 128, PAIRS),
        (40, 256, 128, MANY),
        (3, 256, 192, MIXED),
        (3, 192, 128, HALF_BLOCKS),
        (40, 192, 128, MANY),
        (40, 256, 128, MANY_BLOCKS),
    ],
)
def test_the_gpu_kernel_gives_the_same_bits_for_both_orders(rows, width, hidden, tiles):
    case = exact_case(rows, rows=rows, experts=5, chosen=3, width=width, hidden=hidden, padding=2)
    moved = in_order(case)
    assert [weight.order for weight in moved.stored] == [
        "arranged" if weight.inputs % 128 == 0 else "released" for weight in case.stored
    ]
    found = run_on_gpu(moved, tiles)
    assert_meaning(found, case)
    np.testing.assert_array_equal(found, run_on_gpu(case, tiles))


@pytest.mark.parametrize("tiles", [BLOCKS, MANY])
def test_random_arranged_experts_equal_the_oracle(tiles):
    case = expert_case(7, rows=9, experts=4, chosen=2, width=384, hidden=256, dtype=jnp.bfloat16, padding=1)
    options = {"swiglu_limit": 0.0, "quantize_hidden": False}
    assert_meaning(run_on_gpu(in_order(case), tiles, **options), case, **options)


@pytest.mark.parametrize("matrices", [(0, 1), (2,)])
def test_gate_and_up_may_have_another_order_than_down(matrices):
    case = exact_case(5, rows=4, experts=3, chosen=2, width=128, hidden=128)
    np.testing.assert_array_equal(run_on_gpu(in_order(case, matrices), BLOCKS), run_on_gpu(case, BLOCKS))


@pytest.mark.parametrize("tiles", [BLOCKS, MANY])
def test_a_scale_that_is_nan_reaches_what_it_reaches_in_the_released_order(tiles):
    case = exact_case(3, rows=6, experts=3, chosen=1, width=128, hidden=128, poison_unused=False)
    *others, down = case.stored
    down = down._replace(scales=down.scales.at[:, 5, 2].set(255))
    case = dataclasses.replace(case, stored=(*others, down))
    found = run_on_gpu(in_order(case), tiles)
    assert np.isnan(found[:, 5]).all() and np.isfinite(np.delete(found, 5, axis=1)).all()
    np.testing.assert_array_equal(found, run_on_gpu(case, tiles))


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_one_layer_of_an_arranged_stack(implementation):
    cases = [
        exact_case(seed, rows=12, experts=4, chosen=2, width=128, hidden=128, poison_unused=False) for seed in (6, 7)
    ]
    x, ids, routing, *_ = cases[1].arrays()
    call = functools.partial(
        grouped_experts, swiglu_limit=10.0, quantize_hidden=True, layer=jnp.int32(1), implementation=implementation
    )
    stacks = [
        jax.tree.map(lambda *parts: jnp.stack(parts), *(case.stored for case in form))
        for form in (cases, [in_order(case) for case in cases])
    ]
    released, moved = (np.asarray(call(x, ids, routing, *stack, valid=jnp.ones(12, bool))) for stack in stacks)
    assert_meaning(moved, cases[1])
    np.testing.assert_array_equal(moved, released)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_definition_gives_the_same_bits_for_both_orders(dtype):
    case = expert_case(4, rows=9, experts=4, chosen=2, width=256, hidden=128, dtype=dtype, padding=1)
    np.testing.assert_array_equal(run(in_order(case), implementation="xla"), run(case, implementation="xla"))


def test_the_kernel_reads_rows_that_are_in_the_order_of_the_gate():
    case = exact_case(2, rows=5, experts=4, chosen=2, width=128, hidden=64)
    moved = in_order(case)
    x, *others = moved.arrays()
    call = functools.partial(grouped_experts, swiglu_limit=10.0, quantize_hidden=True, implementation="pallas")
    codes = operand_of(x, moved.stored[0].order, cuda=False)
    found = np.asarray(jax.jit(call)(x * jnp.nan, *others, valid=jnp.asarray(case.valid), codes=codes))
    np.testing.assert_array_equal(found, run(case, implementation="pallas"))


def test_what_no_kernel_reads_is_refused_by_name():
    case = in_order(expert_case(1, rows=2, experts=3, chosen=1, width=128, hidden=128, dtype=jnp.bfloat16))
    tpu, refused = backend.Target("tpu", "v5p"), pytest.raises(KernelUnsupportedError, match="not arranged ones")
    with backend.use_target(tpu), refused:
        run(case, implementation="pallas")
    first, _, third = case.stored
    odd = third._replace(packed=third.packed[..., :24])
    plain = expert_case(1, rows=2, experts=3, chosen=1, width=128, hidden=128, dtype=jnp.bfloat16).stored[1]
    faulty = dataclasses.replace(case, stored=(first, plain, odd))
    with pytest.raises(ValueError, match=r"w2 is arranged but its 96 inner dims.*w1 is arranged and w3 is released"):
        run(faulty)


@pytest.mark.parametrize(
    ("target", "dtype", "hidden", "reads"),
    [
        (backend.Target("triton", "cuda"), jnp.bfloat16, 2304, True),
        (backend.Target("triton", "rocm"), jnp.bfloat16, 2304, False),
        (backend.Target("triton", "cuda"), jnp.float32, 2304, False),
        (backend.Target("triton", "cuda"), jnp.bfloat16, 96, False),
        (backend.Target("triton", "cpu", interpret=True), jnp.bfloat16, 2304, False),
        (backend.Target("tpu", "v6e"), jnp.bfloat16, 2304, False),
    ],
)
def test_arranged_weights_are_for_the_kernel_of_an_nvidia_gpu(target, dtype, hidden, reads):
    with backend.use_target(target):
        assert reads_arranged(5120, hidden, dtype) == reads
