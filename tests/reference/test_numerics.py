"""Elementary arithmetic of the reference against published figures."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.engram import pico_config, with_text
from v41jax.config import YarnConfig
from v41jax.reference.numerics import (
    Arithmetic,
    rms_norm,
    rope_frequencies,
    rope_tables,
    rotate,
    round_to_bfloat16,
    sigmoid,
)

YARN_BITS = """
3f800000 3f300a3a 3ef21c1f 3ea67d01 3e64f92e 3e1d7475 3dd88cb4 3d94e963
3d4ccccd 3d0cd4fb 3cc1b019 3c8530ce 3c372dbf 3bfbed88 3bad3d5e 3b6e4237
3b147ae1 3ab714e0 3a5ebdb6 3a0530ce 399bb3af 39305978 38be904d 383e9b5f
37a3d70c 36b443d0 3677eba6 362a7be8 35ea77ff 35a13bdc 355dbf30 35187c4d
"""
PLAIN_BITS = """
3f800000 3f3ff911 3f0ff59a 3ed7e89b 3ea1e89b 3e72d423 3e361887 3e088d77
3dcccccd 3d99940d 3d6655c2 3d2cba15 3d0186e3 3cc2434f 3c91ad39 3c5a7bf2
3c23d70a 3bf5b9b0 3bb8449c 3b8a2e77 3b4f3e38 3b1b690d 3ae91528 3aaec98e
3a83126f 3a44948c 3a136a16 39dd1725 39a5cb60 3978a815 393a7753 390bd472
"""
RELEASED = with_text(
    pico_config(),
    qk_rope_head_dim=64,
    rope_theta=10000,
    compress_rope_theta=160000,
    rope_scaling=YarnConfig(16, 32, 1, 65536),
).text

EXACT = Arithmetic(activation_quantization=False)
ROUNDED = Arithmetic(rounding="bfloat16", activation_quantization=False)


@pytest.mark.parametrize(("compressed", "bits"), [(True, YARN_BITS), (False, PLAIN_BITS)])
def test_rope_frequencies_to_the_bit(compressed, bits):
    frequencies = rope_frequencies(RELEASED, compressed=compressed)
    assert frequencies.dtype == np.float32
    assert [f"{word:08x}" for word in frequencies.view(np.uint32)] == bits.split()


@pytest.mark.parametrize(
    ("position", "pair", "cos", "sin"),
    [
        (1, 3, 0.947595656, 0.319472194),
        (127, 3, -0.897734284, -0.440537393),
        (100000, 3, -0.190167516, 0.98175168),
        (1000000, 20, -0.0971240923, 0.995272279),
    ],
)
def test_rope_tables(position, pair, cos, sin):
    table = rope_tables(rope_frequencies(RELEASED, compressed=True), np.array([position]))
    assert table[0][0, pair] == np.float32(cos)
    assert table[1][0, pair] == np.float32(sin)


def test_rotation_turns_adjacent_trailing_pairs_and_its_inverse_undoes_it():
    x = np.arange(1.0, 9.0).reshape(1, 8)
    cos, sin = np.array([[0.6, 0.8]]), np.array([[0.8, 0.6]])
    turned = rotate(x, cos, sin, EXACT)
    expected = [1, 2, 3, 4, 5 * 0.6 - 6 * 0.8, 5 * 0.8 + 6 * 0.6, 7 * 0.8 - 8 * 0.6, 7 * 0.6 + 8 * 0.8]
    assert np.allclose(turned, [expected], rtol=1e-15)
    assert np.allclose(rotate(turned, cos, -sin, EXACT), x, rtol=1e-15)
    heads = np.repeat(x[:, None], 3, axis=1)
    assert np.array_equal(rotate(heads, cos, sin, EXACT), np.repeat(turned[:, None], 3, axis=1))


@given(st.floats(width=32, allow_nan=False))
def test_rounding_of_float32_values_is_the_bfloat16_cast(value):
    with np.errstate(over="ignore"):
        cast = np.float32(value).astype(ml_dtypes.bfloat16).astype(np.float64)
    assert round_to_bfloat16(np.array([value], np.float64))[0] == cast


def test_rounding_to_bfloat16_happens_once():
    """A value just above a tie rounds up although its float32 neighbour is the tie itself, which rounds to even."""
    above_tie = 1 + 2.0**-8 + 2.0**-40
    assert round_to_bfloat16(np.array([above_tie]))[0] == 1 + 2.0**-7
    assert round_to_bfloat16(np.array([1 + 2.0**-8]))[0] == 1
    assert np.isnan(round_to_bfloat16(np.array([np.nan]))[0])


def test_rms_norm_rounds_once_at_the_end():
    x, weight = np.array([[3.0, 4.0]]), np.array([1.0, 0.5])
    exact = np.array([[3.0, 2.0]]) / np.sqrt(12.5)
    assert np.allclose(rms_norm(x, weight, 1e-20, EXACT), exact, rtol=1e-15)
    assert np.array_equal(rms_norm(x, weight, 1e-20, ROUNDED), round_to_bfloat16(exact))


def test_sigmoid_far_out():
    assert np.allclose(sigmoid(np.array([-800.0, -30.0, 0.0, 800.0])), [0, np.exp(-30) / (1 + np.exp(-30)), 0.5, 1])


def test_quantizers_are_the_identity_when_off_and_on_the_grid_when_on():
    x = np.random.default_rng(0).standard_normal((3, 128))
    on, off = Arithmetic(), Arithmetic(activation_quantization=False)
    for name in ("q8", "q4n", "index_key", "index_query"):
        assert getattr(off, name)(x, "site") is x
        quantized = getattr(on, name)(x, "site")
        assert quantized.dtype == np.float64
        assert np.array_equal(round_to_bfloat16(quantized), quantized) and not np.array_equal(quantized, x)


def test_fp8_index_format_uses_one_scale_a_row():
    x = np.random.default_rng(1).standard_normal((2, 4, 128))
    fp8 = Arithmetic(index_format="fp8")
    for quantized in (fp8.index_key(x, "site"), fp8.index_query(x, "site")):
        assert quantized.shape == x.shape
        assert 0 < np.abs(quantized - x).max() < 0.2


def test_a_probe_replaces_the_quantizer():
    seen = []

    def probe(site, values, quantize):
        seen.append(site)
        return quantize(values) + 1

    x = np.ones((1, 32))
    assert np.array_equal(Arithmetic(probe=probe).q8(x, "here"), x + 1) and seen == ["here"]


def test_unknown_switches_are_refused_together():
    with pytest.raises(ValueError, match=r"rounding is 'half'.*; index_rounding is 'x'.*; index_format is 'bf16'"):
        Arithmetic(rounding="half", index_rounding="x", index_format="bf16")
