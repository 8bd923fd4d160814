"""Every implementation of `route` against an order written out in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import backend
from pallas_kernels.route import route

OPTIONS = {"chosen": 6, "temperature": 1.0, "normalize": True, "scale": 1.5}
IMPLEMENTATIONS = ["xla", "pallas"]


def operands(rows, experts, layers=3, seed=0):
    """Logits of a wide range, biases of several layers, and every other row of an image."""
    rng = np.random.default_rng(seed)
    return (
        (rng.normal(size=(rows, experts)) * 8).astype(np.float32),
        *(rng.normal(size=(layers, experts)).astype(np.float32) for _ in range(2)),
        np.arange(rows) % 2 == 1,
    )


@functools.cache
def compiled(**options):
    return jax.jit(functools.partial(route, **options))


def call(arrays, layer=1, **options):
    ids, weights = compiled(layer=layer, **(OPTIONS | options))(*map(jnp.asarray, arrays))
    return np.asarray(ids), np.asarray(weights)


def oracle(arrays, layer=1, chosen=6, temperature=1.0, normalize=True, scale=1.5):
    """Ids by (biased score descending, NaN last, id ascending) and float64 weights of the unbiased scores."""
    logits, bias, bias_vl, image = arrays
    with np.errstate(invalid="ignore"):
        scores = np.sqrt(np.logaddexp(0, logits.astype(np.float64) / temperature))
        biased = np.float32(scores) + np.where(image[:, None], bias_vl[layer], bias[layer])
    order = np.argsort(-np.where(np.isnan(biased), -np.inf, biased), axis=1, kind="stable")
    ids = np.sort(order[:, :chosen], axis=1)
    weights = np.take_along_axis(scores, ids, axis=1)
    return ids, scale * (weights / weights.sum(1, keepdims=True) if normalize else weights)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("rows", "experts"), [(0, 8), (1, 96), (3, 384), (7, 6)])
def test_the_largest_biased_scores_are_chosen_and_weigh_without_bias(rows, experts, implementation):
    arrays = operands(rows, experts)
    ids, weights = call(arrays, implementation=implementation)
    assert ids.dtype == np.int32 and weights.dtype == np.float32
    wanted, wanted_weights = oracle(arrays)
    np.testing.assert_array_equal(ids, wanted)
    np.testing.assert_allclose(weights, wanted_weights, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_options_are_heeded(implementation):
    arrays = operands(4, 20, seed=1)
    options = {"chosen": 2, "temperature": 3.0, "normalize": False, "scale": 2.0}
    ids, weights = call(arrays, implementation=implementation, **options)
    wanted, wanted_weights = oracle(arrays, **options)
    np.testing.assert_array_equal(ids, wanted)
    np.testing.assert_allclose(weights, wanted_weights, rtol=1e-6)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([-30.0, 0.0, 1.0, 25.0, np.inf, -np.inf, np.nan]), min_size=14, max_size=14))
def test_ties_infinities_and_nan_are_ordered_alike(values):
    logits = np.float32(values).reshape(2, 7)
    arrays = (logits, np.float32([[0, 0, 1, 0, -np.inf, 0, 0]]), np.zeros((1, 7), np.float32), np.array([False, True]))
    plain, kernel = (call(arrays, layer=0, chosen=3, normalize=False, implementation=name) for name in IMPLEMENTATIONS)
    np.testing.assert_array_equal(plain[0], oracle(arrays, layer=0, chosen=3, normalize=False)[0])
    np.testing.assert_array_equal(kernel[0], plain[0])
    np.testing.assert_allclose(kernel[1], plain[1], rtol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_row_does_not_depend_on_its_neighbours_or_other_layers(implementation):
    arrays = operands(4, 12, seed=2)
    whole = call(arrays, implementation=implementation)
    poisoned = [np.full_like(part, np.nan) for part in arrays[:3]]
    poisoned[0][2] = arrays[0][2]
    for kept, part in zip(poisoned[1:], arrays[1:3], strict=True):
        kept[1] = part[1]
    for alone, part in zip(call((*poisoned, arrays[3]), implementation=implementation), whole, strict=True):
        np.testing.assert_array_equal(alone[2], part[2])


def test_one_layer_needs_no_stack():
    logits, bias, bias_vl, image = operands(2, 16)
    for implementation in IMPLEMENTATIONS:
        ids, _ = call((logits, bias[1], bias_vl[1], image), layer=None, implementation=implementation)
        np.testing.assert_array_equal(ids, oracle((logits, bias, bias_vl, image))[0])


def test_all_faults_are_named_together():
    logits, bias, bias_vl, image = map(jnp.asarray, operands(2, 16))
    with pytest.raises(
        ValueError, match=r"bias has shape \(3, 16\), not \[E\].*image_rows has shape \(1,\).*17 experts of 16"
    ):
        route(logits, bias, bias_vl[0], image[:1], **(OPTIONS | {"chosen": 17}))


@pytest.mark.parametrize("implementation", ["auto", "pallas"])
def test_a_gpu_takes_the_kernel_and_a_tpu_the_definition(implementation):
    shapes = [jax.ShapeDtypeStruct(part.shape, part.dtype) for part in operands(3, 96)]
    call = functools.partial(route, layer=0, implementation=implementation, **OPTIONS)
    for target, kernel in ((backend.Target("triton", "cuda"), True), (backend.Target("tpu", "v5p"), False)):
        with backend.use_target(target):
            traced = jax.make_jaxpr(lambda *arguments: call(*arguments))(*shapes)
        assert ("pallas_call" in str(traced)) == kernel
