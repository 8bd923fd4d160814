"""`quantized_rows`: the definition against float64, the GPU kernels against the definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import backend
from pallas_kernels.backend import KernelUnsupportedError
from pallas_kernels.grouped_experts.triton_parts import operand_of
from pallas_kernels.quantized_rows import collapsed_rows, gated_rows, normalized_rows, summed_rows, triton
from pallas_kernels.triton_widening import fp8_operand
from v41jax.quantization import fake_q8

BFLOAT16 = jnp.dtype(jnp.bfloat16)
EPSILON = 1e-20


def case(kind, rows, width, dtype=BFLOAT16, seed=0):
    """The call and its operands."""
    random = np.random.default_rng(seed)
    weight = jnp.asarray(random.normal(size=width), jnp.bfloat16)
    options = {"dtype": dtype} if kind != "collapsed" else {"codes": "released"}
    if kind == "collapsed":
        streams = jnp.asarray(random.normal(size=(rows, 4, width)), dtype)
        return collapsed_rows, (streams, random.uniform(0, 1, (rows, 4)).astype(np.float32), weight), options
    parts = [random.normal(size=(count, rows, width)).astype(np.float32) * 3 for count in (3, 1)]
    if kind == "normalized":
        return normalized_rows, (parts[0], weight), options
    return gated_rows, tuple(parts), options | {"limit": 4.0}


def run(function, operands, options, implementation="pallas", quantize=True, layer=None):
    if function is not gated_rows:
        options = options | {"epsilon": EPSILON, "layer": layer}
    bound = functools.partial(function, quantize=quantize, implementation=implementation, **options)
    return jax.jit(bound)(*map(jnp.asarray, operands))


def wide(x):
    return np.asarray(x, np.float64)


def expected(kind, operands, dtype):
    """The rounded rows in float64, with the rounding in between."""
    first = wide(operands[0])
    if kind == "gated":
        gate, up = (wide(jnp.asarray(wide(part).sum(axis=0), dtype)) for part in operands)
        gate, up = np.minimum(gate, 4), np.clip(up, -4, 4)
        return gate / (1 + np.exp(-gate)) * up
    row = (first * wide(operands[1])[:, :, None]).sum(axis=1) if kind == "collapsed" else first.sum(axis=0)
    row = wide(jnp.asarray(row, dtype))
    return row / np.sqrt(np.mean(row**2, axis=1, keepdims=True)) * wide(operands[-1])


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("dtype", [BFLOAT16, jnp.dtype(jnp.float32)])
@pytest.mark.parametrize("kind", ["collapsed", "normalized", "gated"])
def test_rows_are_those_of_float64_and_their_quantizer(kind, dtype, implementation):
    function, operands, options = case(kind, 3, 1184, dtype)
    found = run(function, operands, options, implementation)
    # The last rounding is of a float32 value, which may lie on the other side of a midpoint; sums of parts cancel.
    relative, absolute = (2.0**-8, 1e-5) if dtype == jnp.bfloat16 else (2e-6, 4e-6)
    np.testing.assert_allclose(wide(found.rounded), expected(kind, operands, dtype), rtol=relative, atol=absolute)
    assert found.rounded.dtype == found.quantized.dtype == dtype
    np.testing.assert_array_equal(wide(found.quantized), wide(jax.jit(fake_q8)(found.rounded)))


@settings(max_examples=6)
@given(st.sampled_from(["collapsed", "normalized", "gated"]), st.integers(1, 5), st.integers(1, 40), st.integers(0, 9))
def test_the_kernel_rounds_where_the_definition_does(kind, rows, groups, seed):
    function, operands, options = case(kind, rows, 32 * groups, seed=seed)
    found, defined = (run(function, operands, options, name) for name in ("pallas", "xla"))
    # Sums of squares are added up in another order: few values of a row may fall on the other side of a midpoint.
    differ = wide(found.rounded) != wide(defined.rounded)
    assert differ.mean() <= 0.01
    np.testing.assert_allclose(wide(found.rounded), wide(defined.rounded), rtol=2.0**-7)


@pytest.mark.parametrize("width", [96, 1056])
@pytest.mark.parametrize("kind", ["collapsed", "normalized", "gated"])
def test_orders_are_those_of_the_kernels_that_read_them(kind, width):
    function, operands, options = case(kind, 2, width)
    found = run(function, operands, options)
    padded = -(-width // 64) * 64
    np.testing.assert_array_equal(wide(found.lanes), wide(fp8_operand(found.quantized, padded)))
    if kind == "collapsed":
        np.testing.assert_array_equal(wide(found.codes), wide(operand_of(found.quantized, "released", cuda=False)))
        assert run(function, operands, options | {"codes": None}).codes is None
    assert run(function, operands, options, "xla").lanes is None


@pytest.mark.parametrize("width", [128, 1152])
def test_codes_are_in_the_order_of_arranged_experts(width):
    function, operands, options = case("collapsed", 2, width)
    found = run(function, operands, options | {"codes": "arranged"})
    np.testing.assert_array_equal(wide(found.codes), wide(operand_of(found.quantized, "arranged", cuda=False)))


@pytest.mark.parametrize("kind", ["collapsed", "normalized", "gated"])
def test_without_quantization_the_rows_stay_as_they_are(kind):
    function, operands, options = case(kind, 2, 96)
    for implementation in ("xla", "pallas"):
        found = run(function, operands, options, implementation, quantize=False)
        np.testing.assert_array_equal(wide(found.quantized), wide(found.rounded))


@pytest.mark.parametrize("kind", ["collapsed", "normalized", "gated"])
def test_what_is_not_finite_stays_in_its_row_as_the_definition_has_it(kind):
    function, (first, *others), options = case(kind, 5, 96)
    first = np.asarray(first, np.float32)
    rows = first if kind == "collapsed" else first.swapaxes(0, 1)
    rows[1, 0, 40], rows[2, 0, 5], rows[3, 0, 70] = np.nan, np.inf, -np.inf
    first = jnp.asarray(first, operands_dtype(kind))
    found, defined = (run(function, (first, *others), options, name) for name in ("pallas", "xla"))
    for row in range(5):
        np.testing.assert_array_equal(np.isnan(wide(found.quantized)[row]), np.isnan(wide(defined.quantized)[row]))
    assert np.isfinite(wide(found.quantized)[[0, 4]]).all() and np.isnan(wide(found.quantized)[1]).any()


def operands_dtype(kind):
    return BFLOAT16 if kind == "collapsed" else jnp.float32


def test_a_group_that_overflows_is_quantized_as_the_definition_does():
    """Infinities that only the weight of the norm makes: their group's scale is 2^127."""
    function, (streams, pre, weight), options = case("collapsed", 2, 96)
    streams, weight = streams.at[:, :, 3].set(9.0), weight.at[3].set(3e38)
    found, defined = (run(function, (streams, pre, weight), options, name) for name in ("pallas", "xla"))
    assert np.isinf(wide(defined.rounded)).any()
    np.testing.assert_array_equal(wide(found.quantized)[:, :32], wide(defined.quantized)[:, :32])


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_one_layer_of_a_run_is_that_layer_alone(implementation):
    for kind in ("collapsed", "normalized"):
        function, (*operands, weight), options = case(kind, 2, 64)
        stack = jnp.stack([jnp.full_like(weight, jnp.nan), weight])
        alone = run(function, (*operands, weight), options, implementation)
        of_run = run(function, (*operands, stack), options, implementation, layer=1)
        np.testing.assert_array_equal(wide(of_run.quantized), wide(alone.quantized))


@pytest.mark.parametrize(
    ("target", "rows", "kernel"),
    [
        (backend.Target("triton", "cuda"), 1, True),
        (backend.Target("triton", "rocm"), triton.MOST_ROWS, True),
        (backend.Target("triton", "cuda"), triton.MOST_ROWS + 1, False),
        (backend.Target("tpu", "v6e"), 1, False),
    ],
)
def test_auto_takes_the_kernel_for_few_rows_of_a_gpu(target, rows, kernel):
    streams = jax.ShapeDtypeStruct((rows, 4, 5120), BFLOAT16)
    pre, weight = jax.ShapeDtypeStruct((rows, 4), jnp.float32), jax.ShapeDtypeStruct((5120,), BFLOAT16)
    with backend.use_target(target):
        bound = functools.partial(collapsed_rows, epsilon=EPSILON, quantize=True)
        assert ("pallas_call" in str(jax.make_jaxpr(bound)(streams, pre, weight))) == kernel


def test_a_product_alone_is_summed_rounded_and_quantized():
    parts = np.random.default_rng(0).normal(size=(3, 5, 96)).astype(np.float32)
    call = functools.partial(summed_rows, quantize=True, dtype=BFLOAT16)
    found, defined = (jax.jit(functools.partial(call, implementation=name))(parts) for name in ("pallas", "xla"))
    np.testing.assert_array_equal(wide(found.rounded), wide(jnp.asarray(parts[0] + parts[1] + parts[2], BFLOAT16)))
    for left, right in zip(found[:2], defined[:2], strict=True):
        np.testing.assert_array_equal(wide(left), wide(right))
    np.testing.assert_array_equal(wide(found.lanes), wide(fp8_operand(found.quantized, 128)))


def test_asking_for_kernels_is_no_error_where_a_tpu_needs_none():
    function, operands, options = case("collapsed", 2, 64)
    with backend.use_target(backend.Target("tpu", "cpu", interpret=True)):
        found = run(function, operands, options)
    np.testing.assert_array_equal(wide(found.quantized), wide(run(function, operands, options, "xla").quantized))


def test_what_does_not_fit_is_refused():
    function, (streams, pre, weight), _ = case("collapsed", 2, 64)
    with pytest.raises(ValueError, match=r"rows of 64 with layer 0 got a weight \(64,\)"):
        function(streams, pre, weight, epsilon=EPSILON, quantize=True, layer=0)
    with pytest.raises(ValueError, match=r"needs pre_mix \[N, S\]; got \(2, 3\)"):
        function(streams, pre[:, :3], weight, epsilon=EPSILON, quantize=True)
    with pytest.raises(ValueError, match=r"same rows; got \(1, 2, 64\) and \(1, 3, 64\)"):
        gated_rows(jnp.zeros((1, 2, 64)), jnp.zeros((1, 3, 64)), limit=0, quantize=False, dtype=BFLOAT16)
    with pytest.raises(KernelUnsupportedError, match="rows of 48 are not whole groups of 32"):
        gated_rows(*[jnp.zeros((1, 2, 48))] * 2, limit=0, quantize=True, dtype=BFLOAT16, implementation="pallas")
