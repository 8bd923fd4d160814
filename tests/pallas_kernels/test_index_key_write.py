"""`index_key_write` against a NumPy chain written from the specification, and what it must leave alone."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import backend
from pallas_kernels.index_key_write import index_key_write, tpu
from pallas_kernels.index_scores import index_scores
from pallas_kernels.plane_layouts import from_lanes, to_lanes
from tests.pallas_kernels.index_oracle import decode_plane, random_plane
from tests.pallas_kernels.tpu_modes import interpretation

ROWS, WIDTH, ROTATED, PAGES = 16, 64, 32, 7
EPSILON = 1e-20


def write_case(seed, index_format, count=11, dtype=jnp.bfloat16):
    """Keys for entries of several pages and page borders; every third writes nothing. A sentinel fills the plane."""
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((count, WIDTH)) * 2.0 ** rng.integers(-4, 4, (count, 1))
    keys[1] = 0
    angles = rng.uniform(0, 6, (count, ROTATED // 2))
    requests = np.where(np.arange(count) % 3 == 2, -1, rng.integers(0, 2, count)).astype(np.int32)
    entries = np.concatenate([[0, ROWS - 1, ROWS, 3 * ROWS - 1], rng.permutation(np.arange(1, ROWS - 1))]).astype(
        np.int32
    )
    tables = rng.permutation(np.arange(1, PAGES)).reshape(2, 3).astype(np.int32)
    values = np.full((PAGES, ROWS, WIDTH // 2 if index_format == "fp4" else WIDTH), 0xAB, np.uint8)
    scales = (
        np.full((PAGES, ROWS, 2), 0xCD, np.uint8) if index_format == "fp4" else np.full((PAGES, ROWS), 77, np.float32)
    )
    if index_format == "float":
        values, scales = np.full(values.shape, 77, dtype), None
    arrays = (
        jnp.asarray(keys, dtype),
        jnp.asarray(rng.uniform(0.5, 2, WIDTH), jnp.float32),
        jnp.asarray(np.cos(angles), jnp.float32),
        jnp.asarray(np.sin(angles), jnp.float32),
        jnp.asarray(requests),
        jnp.asarray(entries[:count]),
        jnp.asarray(tables),
        jnp.asarray(values),
        None if scales is None else jnp.asarray(scales),
    )
    return arrays


def rotated_oracle(arrays):
    """[C, I] float64 keys before the quantizer, rounded where the chain rounds."""
    keys, norm, cos, sin = (np.asarray(x).astype(np.float64) for x in arrays[:4])
    dtype = ml_dtypes.bfloat16 if arrays[0].dtype == jnp.bfloat16 else np.float32
    normed = (keys / np.sqrt((keys**2).mean(1, keepdims=True) + EPSILON) * norm).astype(dtype).astype(np.float64)
    even, odd = normed[:, WIDTH - ROTATED :: 2], normed[:, WIDTH - ROTATED + 1 :: 2]
    out = normed.copy()
    out[:, WIDTH - ROTATED :: 2] = even * cos - odd * sin
    out[:, WIDTH - ROTATED + 1 :: 2] = even * sin + odd * cos
    return out.astype(dtype).astype(np.float64)


def destinations(arrays):
    """(row of the batch, page, offset) of every live key."""
    requests, entries, tables = (np.asarray(x) for x in arrays[4:7])
    return [
        (row, tables[requests[row], entries[row] // ROWS], entries[row] % ROWS)
        for row in range(len(requests))
        if requests[row] >= 0
    ]


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize(("index_format", "step"), [("fp8", 2**-3), ("fp4", 2**-1)])
def test_stored_keys_are_the_rotated_norm_within_half_a_step(index_format, step, implementation):
    arrays = write_case(0, index_format)
    values, scales = index_key_write(*arrays, epsilon=EPSILON, index_format=index_format, implementation=implementation)
    decoded = decode_plane(np.asarray(values), np.asarray(scales), index_format)
    expected = rotated_oracle(arrays)
    for row, page, offset in destinations(arrays):
        peak = np.abs(expected[row]).max()
        np.testing.assert_allclose(decoded[page, offset], expected[row], rtol=0.51 * step, atol=0.26 * step * peak / 2)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("index_format", ["fp8", "fp4"])
def test_every_other_byte_of_the_plane_stays(index_format, implementation):
    arrays = write_case(1, index_format)
    stored = index_key_write(*arrays, epsilon=EPSILON, index_format=index_format, implementation=implementation)
    untouched = np.ones((PAGES, ROWS), bool)
    for _, page, offset in destinations(arrays):
        untouched[page, offset] = False
    for before, after in zip(arrays[7:], stored):
        np.testing.assert_array_equal(np.asarray(after)[untouched], np.asarray(before)[untouched])
        assert (np.asarray(after)[~untouched] != np.asarray(before)[~untouched]).any()


@pytest.mark.parametrize("index_format", ["fp8", "fp4"])
def test_the_gpu_kernel_writes_the_bytes_of_the_plain_chain(index_format):
    arrays = write_case(2, index_format)
    plain = index_key_write(*arrays, epsilon=EPSILON, index_format=index_format, implementation="xla")
    kernel = index_key_write(*arrays, epsilon=EPSILON, index_format=index_format, implementation="pallas")
    for expected, found in zip(plain, kernel):
        np.testing.assert_array_equal(found, expected)


def tpu_case(index_format, rows, count=150):
    """Keys that fill two windows and land all over the pages of two requests; every fifth writes nothing."""
    rng = np.random.default_rng(rows)
    keys = rng.standard_normal((count, 128)) * 2.0 ** rng.integers(-4, 4, (count, 1))
    angles = rng.uniform(0, 6, (count, 32))
    request, entry = np.divmod(rng.permutation(2 * 3 * rows)[:count], 3 * rows)
    request = np.where(np.arange(count) % 5 == 4, -1, request)
    return (
        jnp.asarray(keys, jnp.bfloat16),
        *(jnp.asarray(x, jnp.float32) for x in (rng.uniform(0.5, 2, 128), np.cos(angles), np.sin(angles))),
        *(jnp.asarray(x, jnp.int32) for x in (request, entry, rng.permutation(np.arange(1, PAGES)).reshape(2, 3))),
        *map(jnp.asarray, random_plane(rng, PAGES, rows, 128, index_format)),
    )


@pytest.mark.parametrize(
    ("mode", "index_format", "rows"),
    [("generic", "fp8", 64), ("generic", "fp4", 128), ("simulated", "fp8", 128), ("simulated", "fp4", 64)],
)
def test_the_tpu_kernel_writes_the_bytes_of_the_plain_chain(mode, index_format, rows):
    *operands, values, scales = tpu_case(index_format, rows)
    options = {"epsilon": EPSILON, "index_format": index_format}
    plain = functools.partial(index_key_write, **options, implementation="xla")
    expected = jax.jit(plain)(*operands, values, scales)
    plane = (values, scales) if rows == 128 else to_lanes(values, scales, index_format)
    with interpretation(mode) as interpret:
        run = functools.partial(tpu.index_key_write, **options, interpret=interpret)
        found = jax.block_until_ready(jax.jit(run)(*operands, *plane))
    if rows == 64:
        found = from_lanes(*found, index_format)
    for wanted, stored in zip(expected, found):
        np.testing.assert_array_equal(stored, wanted)


def test_with_nothing_to_write_the_tpu_kernel_leaves_every_byte():
    *operands, values, scales = tpu_case("fp4", 128)
    operands[4] = jnp.full_like(operands[4], -1)
    with backend.use_target(backend.Target("tpu", "cpu", interpret=True)):
        found = index_key_write(*operands, values, scales, epsilon=EPSILON, index_format="fp4", implementation="pallas")
    np.testing.assert_array_equal(found[0], values)
    np.testing.assert_array_equal(found[1], scales)


def test_a_plane_in_the_tpu_layout_stays_in_it():
    *operands, values, scales = tpu_case("fp8", 64, count=4)
    write = jax.jit(functools.partial(index_key_write, epsilon=EPSILON, index_format="fp8", implementation="xla"))
    held = write(*operands, *to_lanes(values, scales, "fp8"))
    for wanted, stored in zip(write(*operands, values, scales), from_lanes(*held, "fp8")):
        np.testing.assert_array_equal(stored, wanted)


def test_a_float_plane_holds_the_rotated_norm_itself():
    arrays = write_case(3, "float", dtype=jnp.float32)
    values, scales = index_key_write(*arrays, epsilon=EPSILON, index_format="float")
    assert scales is None
    expected = rotated_oracle(arrays)
    for row, page, offset in destinations(arrays):
        np.testing.assert_allclose(values[page, offset], expected[row], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("index_format", ["fp4"])
def test_a_written_key_is_what_the_scorer_reads(index_format):
    arrays = write_case(4, index_format, count=2)
    values, scales = index_key_write(*arrays, epsilon=EPSILON, index_format=index_format)
    key = decode_plane(np.asarray(values), np.asarray(scales), index_format)
    row, page, offset = destinations(arrays)[0]
    query = jnp.asarray(np.sign(key[page, offset]), jnp.float32)[None, None]
    entry = int(arrays[5][row])
    found = index_scores(
        query, jnp.ones((1, 1)), jnp.asarray([entry + 1]), arrays[4][row : row + 1], arrays[6], values, scales,
        index_format=index_format,
    )  # fmt: skip
    np.testing.assert_allclose(found[0, entry], np.abs(key[page, offset]).sum(), rtol=1e-5)


def test_keys_of_float32_have_no_gpu_kernel():
    arrays = write_case(5, "fp8", dtype=jnp.float32)
    with pytest.raises(backend.KernelUnsupportedError, match="it takes bfloat16 keys, not float32"):
        index_key_write(*arrays, epsilon=EPSILON, index_format="fp8", implementation="pallas")
