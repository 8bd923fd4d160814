"""`window_key_write` against the unfused layers, and what it must leave alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backend
from pallas_kernels.rotation import rotate
from pallas_kernels.window_key_write import window_key_write
from v41jax.layers.norm import rms_norm
from v41jax.quantization import fake_q8, quantize_q8

WIDTH, PAIRS, RING, RINGS, OFFSET, LAYERS = 64, 8, 5, 12, 6, 3
EPSILON = 1e-20
FORMATS = {"float": (jnp.bfloat16, WIDTH), "bf16": (jnp.bfloat16, WIDTH), "fp8": (jnp.uint8, WIDTH + 2)}


def case(window_format, count=9, seed=0, dtype=None):
    """Rows of four requests; every third writes nothing and has no request. A sentinel fills the rings."""
    rng = np.random.default_rng(seed)
    latents = rng.standard_normal((count, WIDTH)) * 2.0 ** rng.integers(-6, 6, (count, 1))
    angles = rng.uniform(0, 6, (count, PAIRS))
    live = np.arange(count) % 3 != 2
    stored, row = FORMATS[window_format]
    return [
        jnp.asarray(latents, jnp.bfloat16),
        jnp.asarray(rng.uniform(0.5, 2, (LAYERS, WIDTH)), jnp.bfloat16),
        *(jnp.asarray(part, jnp.float32) for part in (np.cos(angles), np.sin(angles))),
        jnp.asarray(live),
        jnp.asarray(np.where(live, np.arange(count) % 4, -1), jnp.int32),
        jnp.asarray(rng.permutation(100)[:count], jnp.int32).at[: min(4, count)].set(jnp.arange(min(4, count))),
        jnp.asarray([3, 0, 5, 1], jnp.int32),
        jnp.int32(OFFSET),
        jnp.full((RINGS, RING, row), 77, dtype or stored),
    ]


def write(arrays, window_format, implementation, layer=1):
    call = functools.partial(
        window_key_write, epsilon=EPSILON, window_format=window_format, layer=layer, implementation=implementation
    )
    return np.asarray(jax.jit(call)(*arrays))


def places(arrays):
    """(row of the batch, ring, row of the ring) of what is written."""
    written, batch, positions, slots = (np.asarray(part) for part in arrays[4:8])
    return [(n, OFFSET + slots[batch[n]], positions[n] % RING) for n in range(len(written)) if written[n]]


def unfused(arrays, window_format):
    """Rows as the layers make them one after the other."""
    latents, norm, cos, sin = arrays[:4]
    keys = rotate(rms_norm(latents, norm[1], EPSILON), cos, sin)
    if window_format == "fp8":
        return np.concatenate(quantize_q8(keys), axis=1)
    return np.asarray(fake_q8(keys) if window_format == "bf16" else keys)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("window_format", FORMATS)
@pytest.mark.parametrize("count", [1, 9])
def test_rings_hold_the_bytes_of_the_unfused_chain_and_nothing_else_changes(window_format, implementation, count):
    arrays = case(window_format, count)
    after = write(arrays, window_format, implementation)
    expected = np.array(arrays[-1])
    rows = unfused(arrays, window_format)
    for row, ring, place in places(arrays):
        expected[ring, place] = rows[row]
    np.testing.assert_array_equal(after, expected)


@pytest.mark.parametrize("window_format", FORMATS)
def test_rows_that_hold_no_numbers_are_stored_alike_and_stay_alone(window_format):
    arrays = case(window_format, seed=1)
    arrays[0] = arrays[0].at[0, 3].set(jnp.nan).at[1, 60].set(jnp.inf).at[3].set(0).at[2].set(jnp.nan)
    plain, kernel = (write(arrays, window_format, name) for name in ("xla", "pallas"))
    # As float32: NumPy takes a NaN of bfloat16 for unequal to itself.
    np.testing.assert_array_equal(kernel.astype(np.float32), plain.astype(np.float32))
    whole = write(case(window_format, seed=1), window_format, "pallas")
    for row, ring, place in places(arrays):
        assert row in (0, 1, 3) or (kernel[ring, place] == whole[ring, place]).all()


def test_bits_of_bfloat16_are_stored_where_the_rings_hold_bits():
    arrays, bits = case("bf16"), case("bf16", dtype=jnp.uint16)
    for implementation in ("xla", "pallas"):
        wanted, found = (write(part, "bf16", implementation) for part in (arrays, bits))
        for _, ring, place in places(arrays):
            np.testing.assert_array_equal(found[ring, place], wanted[ring, place].view(np.uint16))


def test_a_norm_of_one_layer_needs_no_stack():
    arrays = case("fp8")
    stacked = write(arrays, "fp8", "pallas")
    arrays[1] = arrays[1][1]
    for implementation in ("xla", "pallas"):
        np.testing.assert_array_equal(write(arrays, "fp8", implementation, layer=None), stacked)


def test_all_faults_are_named_together():
    arrays = case("fp8")
    arrays[1], arrays[-1] = arrays[1][:, :32], arrays[-1][..., :64]
    with pytest.raises(ValueError, match=r"norm has shape \(3, 32\), not \[layers, 64\].*rows of 66 do not fit"):
        write(arrays, "fp8", "xla")
    with pytest.raises(ValueError, match="'fp4' is none of"):
        write(arrays, "fp4", "xla")


def test_auto_takes_the_kernel_on_a_gpu_and_writes_in_place():
    shapes = [jax.ShapeDtypeStruct(part.shape, part.dtype) for part in case("fp8")]
    call = functools.partial(window_key_write, epsilon=EPSILON, window_format="fp8", layer=0)
    with backend.use_target(backend.Target("triton", "cuda")):
        text = str(jax.make_jaxpr(call)(*shapes))
    assert "pallas_call" in text and "input_output_aliases=((10, 0),)" in text
