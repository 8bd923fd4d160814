"""Every implementation of `stream_mixes` against the float64 reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backend
from pallas_kernels.stream_mixes import stream_mixes, tpu, triton
from tests.pallas_kernels.tpu_modes import MODES, interpretation
from v41jax.reference.hyper_connections import split_mixes

EPSILON = 1e-6
NAMES = ("pre", "post", "combination")


def operands(rows, streams, seed=0):
    """Normalized projections, base and scale."""
    rng = np.random.default_rng(seed)
    width = 2 * streams + streams**2
    return [rng.normal(size=shape).astype(np.float32) * 3 for shape in ((rows, width), (width,), (3,))]


def stream_operands(rows, streams, width, dtype=jnp.bfloat16):
    """Streams, fn, base and scale; projections have a deviation of one."""
    rng = np.random.default_rng(rows)
    outputs, inner = 2 * streams + streams**2, streams * width
    x = jnp.asarray(rng.normal(size=(rows, streams, width)) * 3, dtype)
    fn = rng.normal(size=(outputs, inner)).astype(np.float32) / np.float32(np.sqrt(inner))
    base, scale = (rng.normal(size=shape).astype(np.float32) for shape in (outputs, 3))
    return x, fn, base, scale


def projected(streams, fn):
    flat = np.asarray(streams, np.float64).reshape(len(streams), fn.shape[1])
    return flat @ np.asarray(fn, np.float64).T / np.sqrt(np.mean(flat**2, axis=1, keepdims=True))


def assert_meaning(found, arrays, streams, iterations):
    z, base, scale = (x.astype(np.float64) for x in arrays)
    wanted = split_mixes(z, scale, base, streams, iterations, EPSILON)
    for name, part in zip(NAMES, found, strict=True):
        # Wide logits: the error of an exponential is that of its argument, here up to 40.
        np.testing.assert_allclose(part, getattr(wanted, name), rtol=2e-5, atol=2e-6, err_msg=name)


def call(function, arrays, streams, iterations, **options):
    bound = functools.partial(function, streams=streams, iterations=iterations, epsilon=EPSILON, **options)
    return [np.asarray(part) for part in jax.jit(bound)(*map(jnp.asarray, arrays))]


def mixed(arrays, iterations=3, layer=None, **options):
    bound = functools.partial(stream_mixes, iterations=iterations, epsilon=EPSILON, norm_epsilon=1e-20, **options)
    return [np.asarray(part) for part in jax.jit(bound)(*map(jnp.asarray, arrays), layer=layer)]


@pytest.mark.parametrize(
    ("rows", "streams", "width", "iterations"),
    [(0, 4, 64, 20), (1, 4, 160, 20), (17, 4, 64, 1), (70, 3, 96, 5), (5, 2, 32, 2)],
)
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_the_public_call_equals_the_reference(rows, streams, width, iterations, implementation):
    x, fn, base, scale = stream_operands(rows, streams, width)
    found = mixed((x, fn, base, scale), iterations, implementation=implementation)
    assert [part.shape for part in found] == [(rows, streams), (rows, streams), (rows, streams, streams)]
    wanted = split_mixes(
        projected(x, fn), scale.astype(np.float64), base.astype(np.float64), streams, iterations, EPSILON
    )
    for name, part in zip(NAMES, found, strict=True):
        np.testing.assert_allclose(part, getattr(wanted, name), rtol=3e-6, atol=3e-7, err_msg=name)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_one_layer_of_a_run_is_that_layer_alone(implementation):
    x, *weights = stream_operands(3, 4, 32)
    stacks = [np.stack([np.full_like(part, np.nan), part]) for part in weights]
    found = mixed((x, *stacks), layer=jnp.int32(1), implementation=implementation)
    for part, alone in zip(found, mixed((x, *weights), implementation=implementation), strict=True):
        np.testing.assert_array_equal(part, alone)


def test_parts_of_the_projections_are_exact_products_of_float32():
    """Products of single elements, which three bfloat16 parts must give to the bit, and the sums of squares."""
    random = np.random.default_rng(1)
    fn = random.normal(size=(1, 8, 512)).astype(np.float32)
    flat = np.zeros((3, 512), np.float32)
    flat[[0, 1, 2], [3, 300, 511]] = (1.0, -2.0, 0.5)
    parts = triton.projection_parts(jnp.asarray(flat, jnp.bfloat16), fn, jnp.zeros(1, jnp.int32), interpret=True)
    assert parts.shape == (2, 3, 16)
    sums = np.asarray(parts).sum(axis=0)
    np.testing.assert_array_equal(sums[:, :8], [fn[0, :, 3], -2 * fn[0, :, 300], 0.5 * fn[0, :, 511]])
    np.testing.assert_array_equal(sums[:, 8], [1, 4, 0.25])


@pytest.mark.parametrize(("width", "programs"), [(160, 2), (256, 4)], ids=["one split, a part of a step", "two splits"])
def test_many_rows_take_several_steps_a_program(monkeypatch, width, programs):
    monkeypatch.setattr(triton, "FEW_ROWS", 16)
    monkeypatch.setattr(triton, "projection_for", lambda rows: triton.Projection(64, 256, programs, 4, 1))
    x, fn, base, scale = stream_operands(75, 4, width)
    found = mixed((x, fn, base, scale), 3, implementation="pallas")
    wanted = split_mixes(projected(x, fn), scale.astype(np.float64), base.astype(np.float64), 4, 3, EPSILON)
    for name, part in zip(NAMES, found, strict=True):
        np.testing.assert_allclose(part, getattr(wanted, name), rtol=3e-6, atol=3e-7, err_msg=name)


def test_a_row_of_streams_does_not_depend_on_its_neighbours():
    x, *weights = stream_operands(20, 4, 32)
    whole = mixed((x, *weights), implementation="pallas")
    poisoned = jnp.full_like(x, jnp.nan).at[7].set(x[7])
    for alone, part in zip(mixed((poisoned, *weights), implementation="pallas"), whole, strict=True):
        np.testing.assert_array_equal(alone[7], part[7])
        assert np.isnan(alone[8]).all()


@pytest.mark.parametrize("function", [triton.coefficients, tpu.coefficients])
@pytest.mark.parametrize(("rows", "streams", "iterations"), [(1, 4, 20), (33, 4, 1), (70, 3, 5), (5, 2, 2)])
def test_coefficients_of_projections_equal_the_reference(function, rows, streams, iterations):
    arrays = operands(rows, streams)
    assert_meaning(call(function, arrays, streams, iterations, interpret=True), arrays, streams, iterations)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [1, 200])
def test_the_tpu_kernel_equals_the_reference(rows, mode):
    arrays = operands(rows, 4)
    with interpretation(mode) as interpret:
        found = call(tpu.coefficients, arrays, 4, 4, interpret=interpret)
    assert_meaning(found, arrays, 4, 4)


def test_many_rows_are_several_steps_of_a_tpu():
    arrays = operands(8 * 128 + 1, 4)
    assert_meaning(call(tpu.coefficients, arrays, 4, 3, interpret=True), arrays, 4, 3)


@pytest.mark.parametrize("function", [triton.coefficients, tpu.coefficients])
def test_a_row_does_not_depend_on_its_neighbours(function):
    z, base, scale = operands(40, 4)
    whole = call(function, (z, base, scale), 4, 20, interpret=True)
    poisoned = np.full_like(z, np.nan)
    poisoned[7] = z[7]
    for alone, part in zip(call(function, (poisoned, base, scale), 4, 20, interpret=True), whole, strict=True):
        np.testing.assert_array_equal(alone[7], part[7])


@pytest.mark.parametrize(
    ("target", "rows", "dtype", "kernels"),
    [
        (backend.Target("triton", "cuda"), 3, jnp.bfloat16, 2),
        (backend.Target("triton", "cuda"), triton.FEW_ROWS + 1, jnp.bfloat16, 2),
        (backend.Target("triton", "cuda"), 3, jnp.float32, 1),
        (backend.Target("tpu", "v5p"), 3, jnp.bfloat16, 1),
    ],
)
def test_auto_takes_the_kernels_on_a_device(target, rows, dtype, kernels):
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in stream_operands(3, 4, 32, dtype)]
    arrays[0] = jax.ShapeDtypeStruct((rows, 4, 32), dtype)
    with backend.use_target(target):
        bound = functools.partial(stream_mixes, iterations=20, epsilon=EPSILON, norm_epsilon=1e-20)
        assert str(jax.make_jaxpr(bound)(*arrays)).count("pallas_call") == kernels


def test_arrays_that_do_not_fit_the_streams_are_refused():
    x, fn, base, scale = stream_operands(3, 4, 32)
    with pytest.raises(ValueError, match=r"streams \(3, 4, 32\) with layer None needs.*\(24, 128\).*got \(23, 128\)"):
        stream_mixes(x, fn[1:], base, scale, iterations=20, epsilon=EPSILON, norm_epsilon=1e-20)
    with pytest.raises(ValueError, match=r"with layer 0 needs.*got \(24, 128\)"):
        stream_mixes(x, fn, base, scale, layer=0, iterations=20, epsilon=EPSILON, norm_epsilon=1e-20)


def test_the_kernel_starts_after_an_array_that_it_does_not_read():
    x, *arrays = stream_operands(3, 4, 64)
    call = functools.partial(stream_mixes, iterations=3, epsilon=EPSILON, norm_epsilon=1e-20, implementation="pallas")
    plain = call(x, *arrays)
    later = jax.jit(lambda after: call(x, *arrays, after=after))
    for one, other in zip(plain, later(jnp.full(7, jnp.nan)), strict=True):
        np.testing.assert_array_equal(one, other)
    with backend.use_target(backend.Target("triton", "cuda")):
        traced = jax.make_jaxpr(lambda after: call(x, *arrays, after=after))(jnp.zeros(7)).jaxpr
        _, used = jax.interpreters.partial_eval.dce_jaxpr(traced, [True] * 3)
    assert used == [True]
