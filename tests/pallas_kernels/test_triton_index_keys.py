"""Index keys as the GPU kernels decode them: plain operations and CUDA's packed instructions, over every code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.triton_index_keys import decoded_fp4, e2m1_cuda, packed_view, split_of, stacked_query
from tests.pallas_kernels import ptx
from tests.pallas_kernels.index_oracle import E2M1, decode_plane


@pytest.mark.parametrize("place", range(8))
def test_cuda_instructions_decode_every_code_at_every_place(place):
    words = np.random.default_rng(place).integers(0, 2**32, (64, 2), dtype=np.uint32)
    found = ptx.run(e2m1_cuda(place), {"$1": words[:, 0].copy(), "$2": words[:, 1].copy()})["$0"]
    codes = words >> np.uint32(4 * place) & 15
    assert set(codes.ravel()) == set(range(16))
    np.testing.assert_array_equal(found[:, None].view(np.float16).astype(np.float64) * 64, E2M1[codes])


def test_rows_decode_to_their_values_in_the_order_of_the_split_query():
    rng = np.random.default_rng(0)
    values = rng.integers(0, 256, (1, 24, 64)).astype(np.uint8)
    scales = rng.integers(0, 30, (1, 24, 4)).astype(np.uint8) + rng.integers(0, 225, (1, 24, 1)).astype(np.uint8)
    words = packed_view(jnp.asarray(values), "fp4")
    parts, row_scale = jax.jit(decoded_fp4, static_argnums=2)(words[0], jnp.asarray(scales[0]), False)
    rows = np.stack([np.asarray(part, np.float64) for part in parts]) * np.asarray(row_scale, np.float64)[:, None]
    expected = stacked_query(decode_plane(values, scales, "fp4")[0][:, None], split_of(words, "fp4"))
    # What float16 cannot hold beside the row's largest group is lost, nothing else.
    peak = np.abs(expected).max((0, 2), keepdims=True)
    assert np.abs(rows - expected).max(initial=0, where=row_scale[:, None] > 0) <= 2.0**-26 * peak.max()
    near = (np.abs(expected) > 2.0**-24 * peak) & (row_scale[:, None] > 2.0**-100)
    np.testing.assert_array_equal(rows[near], expected[near])
    assert near.mean() > 0.5


def test_a_row_with_a_nan_scale_has_a_nan_row_scale():
    _, row_scale = decoded_fp4(jnp.zeros((1, 16), jnp.uint32), jnp.asarray([[1, 255, 3, 4]], jnp.uint8), False)
    assert np.isnan(row_scale[0])
