"""Rows are read out of a pool without a copy of it."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import backend
from pallas_kernels.stored_rows import load_rows
from tests.compile_gates import tpu

pytestmark = pytest.mark.skipif(tpu.unavailable() is not None, reason=str(tpu.unavailable()))


def test_a_tpu_reads_bfloat16_rows_where_they_lie():
    pool = jax.ShapeDtypeStruct((4096, 64, 512), jnp.bfloat16)
    index = jax.ShapeDtypeStruct((256,), jnp.int32)
    with backend.use_target(backend.Target("tpu", "v5p")):
        built = tpu.compile_for_tpu(lambda rows, page, row: load_rows(rows, (page, row)), (pool, index, index), "v5p")
    assert built.temporary_bytes < tpu.shape_bytes(pool) // 16
