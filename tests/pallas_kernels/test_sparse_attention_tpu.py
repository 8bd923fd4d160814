"""The TPU kernel of `sparse_attention` in both interpret modes, against float64 and the definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import backend
from pallas_kernels.backend import KernelUnsupportedError
from pallas_kernels.sparse_attention import sparse_attention, tpu, xla
from pallas_kernels.stored_rows import pad_to_lanes
from tests.pallas_kernels.attention_oracle import attention_case, attention_oracle, relative_error
from tests.pallas_kernels.tpu_modes import interpretation

LIMIT = 3e-3


def attend(case, interpret=True, run=tpu.sparse_attention):
    options = {**case.options, "interpret": interpret} if run is tpu.sparse_attention else case.options
    return jax.block_until_ready(jax.jit(functools.partial(run, **options))(*case.arrays))


def assert_meaning(found, case):
    assert found.dtype == jnp.bfloat16 and found.shape == case.arrays[0].shape
    assert relative_error(found, attention_oracle(case)) < LIMIT
    padding = np.asarray(case.arrays[6]) < 0
    assert not np.asarray(found, np.float32)[padding].any()


# More selected rows than a tile and a ring longer than one, so that every section is cut.
LARGE = {"rows": 4, "selected": 140, "page_rows": 64, "columns": 3, "window": 24, "ring": 133, "padding": 1}


@pytest.mark.parametrize(
    ("mode", "formats", "shape"),
    [
        ("generic", ("bf16", "bf16"), LARGE),
        ("generic", ("fp4", "fp8"), LARGE),
        ("generic", ("float", "fp8"), {"rows": 5, "heads": 20, "padding": 2}),
        ("simulated", ("bf16", "bf16"), {"rows": 3, "padding": 1, "selected": 12}),
        ("simulated", ("fp4", "fp8"), {"rows": 3, "selected": 12}),
    ],
)
def test_kernel_equals_float64_whatever_unused_memory_holds(mode, formats, shape):
    case = attention_case(11, main_format=formats[0], window_format=formats[1], dtype=jnp.bfloat16, **shape)
    with interpretation(mode) as interpret:
        found = attend(case, interpret)
    assert_meaning(found, case)


def test_a_wait_that_is_missing_shows(monkeypatch):
    case = attention_case(11, rows=2, selected=12, dtype=jnp.bfloat16)
    monkeypatch.setattr(tpu._Copies, "wait", lambda *_: None)
    with pytest.raises(AssertionError), interpretation("simulated") as interpret:
        assert_meaning(attend(case, interpret), case)


def test_packed_rows_equal_bfloat16_rows_to_the_bit():
    packed = attention_case(6, rows=4, main_format="fp4", window_format="fp8", dtype=jnp.bfloat16)
    plain = attention_case(6, rows=4, main_format="bf16", window_format="bf16", dtype=jnp.bfloat16)
    found = attend(packed)
    np.testing.assert_array_equal(found, attend(plain))
    assert relative_error(found, np.asarray(attend(packed, run=xla.sparse_attention), np.float64)) < LIMIT


def test_rows_stored_as_bits_are_the_same_rows():
    case = attention_case(6, rows=4, dtype=jnp.bfloat16)
    plain = attend(case)
    for place in (4, 8):
        case.arrays[place] = jax.lax.bitcast_convert_type(case.arrays[place], jnp.uint16)
    np.testing.assert_array_equal(attend(case), plain)


@pytest.mark.parametrize("options", [{"selected": 0}, {"fresh_rows": False}, {"sink_spread": 300.0}])
def test_missing_lists_and_large_sinks(options):
    case = attention_case(12, rows=3, dtype=jnp.bfloat16, **options)
    assert_meaning(attend(case), case)


def test_this_forwards_rows_are_found_across_blocks():
    # Rows whose windows end just before, at and after a block's edge, some of them partly in the ring.
    case = attention_case(13, rows=270, requests=1, heads=2, selected=2, page_rows=64, columns=5, window=128, ring=133,
                          dtype=jnp.bfloat16)  # fmt: skip
    picked = np.array([0, 1, 127, 128, 129, 255, 256, 269])
    narrow = [0, 2, 3, 6, 10, 11, 12, 13, 14, 15]
    for place in narrow:
        case.arrays[place] = case.arrays[place][picked]
    case.rows = [case.rows[row] for row in picked]
    assert_meaning(attend(case), case)


@settings(max_examples=3, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 20), st.integers(0, 20), st.integers(1, 20), st.integers(0, 9)
)
def test_any_shape(rows, requests, heads, selected, window, seed):
    case = attention_case(
        seed, rows=rows, requests=requests, heads=heads, selected=selected, window=window, ring=window + 2,
        columns=6, main_format="fp4", window_format="fp8", dtype=jnp.bfloat16, padding=1,
    )  # fmt: skip
    assert_meaning(attend(case), case)


def test_a_tpu_takes_the_kernel_and_names_what_it_cannot_do():
    def call(case, **options):
        return jax.jit(functools.partial(sparse_attention, **{**case.options, **options}))(*case.arrays)

    packed = attention_case(13, rows=2, ring=32, main_format="fp4", window_format="fp8", dtype=jnp.bfloat16)
    with backend.use_target(backend.Target("tpu", "v6e")):
        wide = [pad_to_lanes(x) if place in (4, 8) else x for place, x in enumerate(packed.arrays)]
        for arrays, taken in ((wide, True), (packed.arrays, False)):
            traced = str(jax.make_jaxpr(functools.partial(sparse_attention, **packed.options))(*arrays))
            assert ("pallas_call" in traced) == taken
    with backend.use_target(backend.Target("tpu", "cpu", interpret=True)):
        with pytest.raises(KernelUnsupportedError, match="main rows of 36 bytes would be copied; hold them 128 wide"):
            call(packed, implementation="pallas")
        packed.arrays[4], packed.arrays[8] = wide[4], wide[8]
        for implementation in ("pallas", "xla"):
            assert_meaning(call(packed, implementation=implementation), packed)
        with pytest.raises(KernelUnsupportedError, match="window of 130"):
            call(packed, implementation="pallas", window=130)
        with pytest.raises(KernelUnsupportedError, match="rings of 11 rows would be copied; give them 16"):
            call(attention_case(13, rows=2, dtype=jnp.bfloat16), implementation="pallas")
        with pytest.raises(KernelUnsupportedError, match="float32"):
            call(attention_case(13, rows=2), implementation="pallas")
