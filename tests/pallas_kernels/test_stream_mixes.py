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


def operands(rows, streams, seed=0):
    rng = np.random.default_rng(seed)
    width = 2 * streams + streams**2
    return [rng.normal(size=shape).astype(np.float32) * 3 for shape in ((rows, width), (width,), (3,))]


def assert_meaning(found, arrays, streams, iterations):
    z, base, scale = (x.astype(np.float64) for x in arrays)
    wanted = split_mixes(z, scale, base, streams, iterations, EPSILON)
    for name, part in zip(("pre", "post", "combination"), found, strict=True):
        # Wide logits: the error of an exponential is that of its argument, here up to 40.
        np.testing.assert_allclose(part, getattr(wanted, name), rtol=2e-5, atol=2e-6, err_msg=name)


def call(function, arrays, streams, iterations, **options):
    bound = functools.partial(function, streams=streams, iterations=iterations, epsilon=EPSILON, **options)
    return [np.asarray(part) for part in jax.jit(bound)(*map(jnp.asarray, arrays))]


@pytest.mark.parametrize(("rows", "streams", "iterations"), [(0, 4, 20), (1, 4, 20), (33, 4, 1), (70, 3, 5), (5, 2, 2)])
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_the_public_call_equals_the_reference(rows, streams, iterations, implementation):
    arrays = operands(rows, streams)
    found = call(stream_mixes, arrays, streams, iterations, implementation=implementation)
    assert [part.shape for part in found] == [(rows, streams), (rows, streams), (rows, streams, streams)]
    assert_meaning(found, arrays, streams, iterations)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [1, 200])
def test_the_tpu_kernel_equals_the_reference(rows, mode):
    arrays = operands(rows, 4)
    with interpretation(mode) as interpret:
        found = call(tpu.stream_mixes, arrays, 4, 4, interpret=interpret)
    assert_meaning(found, arrays, 4, 4)


def test_many_rows_are_several_steps_of_a_tpu():
    arrays = operands(8 * 128 + 1, 4)
    assert_meaning(call(tpu.stream_mixes, arrays, 4, 3, interpret=True), arrays, 4, 3)


@pytest.mark.parametrize("function", [triton.stream_mixes, tpu.stream_mixes])
def test_a_row_does_not_depend_on_its_neighbours(function):
    z, base, scale = operands(40, 4)
    whole = call(function, (z, base, scale), 4, 20, interpret=True)
    poisoned = np.full_like(z, np.nan)
    poisoned[7] = z[7]
    for alone, part in zip(call(function, (poisoned, base, scale), 4, 20, interpret=True), whole, strict=True):
        np.testing.assert_array_equal(alone[7], part[7])


@pytest.mark.parametrize("target", [backend.Target("triton", "cuda"), backend.Target("tpu", "v5p")])
def test_auto_takes_the_kernel_on_a_device(target):
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands(3, 4)]
    with backend.use_target(target):
        traced = jax.make_jaxpr(functools.partial(stream_mixes, streams=4, iterations=20, epsilon=EPSILON))(*arrays)
    assert "pallas_call" in str(traced)


def test_arrays_that_do_not_fit_the_streams_are_refused():
    z, base, scale = operands(3, 4)
    with pytest.raises(ValueError, match=r"over 3 streams needs z \[N, 15\].*got \(3, 24\)"):
        stream_mixes(z, base, scale, streams=3, iterations=20, epsilon=EPSILON)
