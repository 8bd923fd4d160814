"""Codecs and quantizers against the specification's golden vectors, and jnp under `jit` against NumPy bit for bit."""

import zlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from v41jax import quantization, quantization_numpy

BOTH = pytest.mark.parametrize("module", [quantization_numpy, quantization], ids=["numpy", "jit"])


def call(module, name, *args):
    function = getattr(module, name)
    if module is quantization:
        function = jax.jit(function)
        args = [jnp.asarray(arg) for arg in args]
    return jax.tree.map(np.asarray, function(*args))


def every_bfloat16():
    """All finite bfloat16 values, as float32 [65280]."""
    values = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16)
    return values[np.isfinite(values.astype(np.float32))].astype(np.float32)


def every_scale_block(width):
    """[blocks, width]: each finite bfloat16 value as a block's maximum, with a spread of smaller companions."""
    maxima = np.abs(every_bfloat16()[: 65280 // 2])
    fractions = np.concatenate([np.linspace(-1, 1, width - 4), [1.0, 0.0, -0.0, 2.0**-20]]).astype(np.float32)
    return (maxima[:, None] * fractions).astype(ml_dtypes.bfloat16)


def golden_rows(rows, width):
    """`x_j[d]` of the kernel chapter, "Golden vectors": bfloat16 [rows, width]."""
    j, d = np.arange(rows)[:, None], np.arange(width)
    base = ((37 * d + 11 * j) % 101 - 50).astype(np.float32) / np.float32(13)
    return (base * np.exp2(((d // 16 + j) % 5 - 2).astype(np.float32))).astype(ml_dtypes.bfloat16)


def assert_same_bits(left, right):
    left, right = jax.tree.leaves(left), jax.tree.leaves(right)
    for a, b in zip(left, right, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if a.dtype.itemsize > 1:
            nan = np.isnan(a.astype(np.float32))
            np.testing.assert_array_equal(nan, np.isnan(b.astype(np.float32)))
            bits = {2: np.uint16, 4: np.uint32}[a.dtype.itemsize]
            a, b = (np.where(nan, 0, value.view(bits)) for value in (a, b))
        np.testing.assert_array_equal(a, b)


# The published values.


@BOTH
def test_e2m1_magnitudes_ties_and_signs(module):
    given_values = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.75, 0.1, 7])
    codes = call(module, "encode_e2m1", given_values)
    expected = np.float32([0, 1, 1, 2, 2, 4, 4, -1, 0, 6])
    np.testing.assert_array_equal(call(module, "decode_e2m1", codes), expected)
    assert call(module, "encode_e2m1", np.float32([-0.0, -0.1, 0.0])).tolist() == [8, 8, 0]
    every = call(module, "decode_e2m1", np.arange(16, dtype=np.uint8))
    np.testing.assert_array_equal(every, np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]))
    np.testing.assert_array_equal(np.signbit(every), np.arange(16) >= 8)


@BOTH
def test_e2m1_and_e4m3_round_like_ml_dtypes(module):
    x = every_bfloat16()
    expected = x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    np.testing.assert_array_equal(call(module, "encode_e2m1", x), expected)
    expected = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(call(module, "encode_e4m3", x), expected)
    assert call(module, "encode_e4m3", np.float32([np.inf, -np.inf, 465, np.nan])).tolist() == [0x7E, 0xFE, 0x7E, 0x7F]


@BOTH
def test_e4m3_probes(module):
    codes = np.uint8([0x38, 0xB8, 0x01, 0x7E, 0x40, 0xC4])
    np.testing.assert_array_equal(call(module, "decode_e4m3", codes), np.float32([1, -1, 2.0**-9, 448, 2, -3]))
    as_float8 = codes.view(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(call(module, "decode_e4m3", as_float8), np.float32([1, -1, 2.0**-9, 448, 2, -3]))
    assert np.isnan(call(module, "decode_e4m3", np.uint8([0x7F, 0xFF]))).all()


@BOTH
def test_e8m0_is_a_power_of_two_with_a_subnormal_and_a_nan_at_its_ends(module):
    values = call(module, "decode_e8m0", np.arange(256, dtype=np.uint8))
    assert values.view(np.uint32)[0] == 0x00400000
    np.testing.assert_array_equal(values[:255].astype(np.float64), np.exp2(np.arange(255) - 127.0))
    assert np.isnan(values[255])


@BOTH
def test_nibbles_are_low_first(module):
    codes = np.arange(32, dtype=np.uint8).reshape(2, 16) % 16
    packed = call(module, "pack_nibbles", codes)
    assert packed[0, :2].tolist() == [0x10, 0x32]
    np.testing.assert_array_equal(call(module, "unpack_nibbles", packed), codes)


@BOTH
def test_power_of_two_ceiling(module):
    t = np.float32([2.0**-126, 1.0, np.nextafter(np.float32(1), 2), 1.5, 2.0, 2.0**127, 3e38, np.inf, np.nan])
    expected = [1, 127, 128, 128, 128, 254, 254, 254, 255]
    assert call(module, "power_of_two_ceiling_code", t).tolist() == expected


@BOTH
@pytest.mark.parametrize(
    "name, width, maxima, scales",
    [
        ("quantize_q8", 32, [0, 1, 7, 224, 447.9, 448], [2.0**-22, 2.0**-8, 2.0**-6, 0.5, 1, 1]),
        ("quantize_q4m", 32, [0, 0.75, 1, 1.5, 5.9, 6, 12], [2.0**-126, 0.125, 0.25, 0.25, 1, 1, 2]),
        (
            "quantize_q4n",
            16,
            [0, 6 * 2.0**-9, 0.3, 1, 6, 100, 2688, 3e5],
            [2.0**-9, 2.0**-9, 0.05078125, 0.171875, 1, 16, 448, 448],
        ),
    ],
)
def test_scales_of_the_quantizer_table(module, name, width, maxima, scales):
    x = np.zeros((len(maxima), width), np.float32)
    x[:, 3] = maxima
    codes, scale_codes = call(module, name, x)
    decode = "decode_e4m3" if name == "quantize_q4n" else "decode_e8m0"
    np.testing.assert_array_equal(call(module, decode, scale_codes)[:, 0], np.float32(scales))
    assert not codes[0].any()


@BOTH
def test_q4n_saturates_where_its_scale_rounds_down(module):
    x = np.zeros(16, np.float32)
    x[0] = 100
    np.testing.assert_array_equal(call(module, "fake_q4n", x)[0], 96)


@BOTH
def test_golden_bytes_of_the_cache_rows(module):
    row = golden_rows(1, 512)
    codes, scales = call(module, "quantize_q4n", row)
    main = np.concatenate([call(module, "pack_nibbles", codes), scales], axis=-1)
    assert main[0, :8].tobytes().hex() == "bfe5692ec7f45a0e"
    assert scales[0, :10].tobytes().hex() == "222a323a42222a323a41"
    assert (main.size, zlib.crc32(main.tobytes())) == (288, 0xF1D709C4)

    codes, scales = call(module, "quantize_q8", row)
    window = np.concatenate([codes, scales], axis=-1)
    assert window[0, :8].tobytes().hex() == "efe067eccf6ae959"
    assert scales[0, :8].tobytes().hex() == "787a7b797b787a7b"
    assert (window.size, zlib.crc32(window.tobytes())) == (528, 0x2D158607)

    codes, scales = call(module, "quantize_q4m", golden_rows(8, 128))
    packed = call(module, "pack_nibbles", codes)
    first = packed[0].tobytes() + scales[0].tobytes()
    assert first[:8].hex() == "9cb2381aa3c1290b"
    assert (scales[0].tobytes().hex(), len(first), zlib.crc32(first)) == ("7e80817f", 68, 0x5BD35AA0)
    assert (zlib.crc32(packed.tobytes()), zlib.crc32(scales.tobytes())) == (0x9695BA4E, 0xA7C20CD2)

    codes, scale = call(module, "quantize_index_key_fp8", golden_rows(1, 128))
    row_bytes = codes.tobytes() + scale.astype("<f4").tobytes()
    assert row_bytes[:8].hex() == "d7c84fd4b752d141"
    assert (float(scale[0]), len(row_bytes), zlib.crc32(row_bytes)) == (0.0625, 132, 0xBB99EA19)


@BOTH
def test_index_query_scale_is_an_ordinary_float(module):
    q = golden_rows(4, 128)
    codes, scale = call(module, "quantize_index_query_fp8", q)
    largest = np.abs(q.astype(np.float32)).max(-1)
    np.testing.assert_array_equal(scale, largest * np.uint32(0x3B124925).view(np.float32))
    error = np.abs(call(module, "decode_e4m3", codes) * scale[:, None] - q.astype(np.float32))
    assert (error <= largest[:, None] / 28).all()  # half a step of 2^-3 at the top of the range
    _, zero = call(module, "quantize_index_query_fp8", np.zeros((1, 128), np.float32))
    assert 0 < zero[0] < 1e-12


# The definitions, written once more in float64.


def float64_grid(values, block, floor, largest, scale_of, grid):
    """Quantizes by distance to every grid point in float64; the even code wins a tie."""
    blocks = values.astype(np.float64).reshape(*values.shape[:-1], -1, block)
    scale = scale_of(np.maximum(np.abs(blocks).max(-1), floor))[..., None]
    scaled = np.clip(blocks / scale, -largest, largest)
    distance = np.abs(np.abs(scaled)[..., None] - grid)
    odd = np.arange(len(grid)) % 2
    nearest = np.lexsort((np.broadcast_to(odd, distance.shape), distance), axis=-1)[..., 0]
    return (np.copysign(grid[nearest], scaled) * scale).reshape(values.shape)


@BOTH
@pytest.mark.parametrize("name", ["fake_q8", "fake_q4m", "fake_q4n"])
def test_fake_quantization_is_the_nearest_grid_point(module, name):
    rng = np.random.default_rng(7)
    x = (rng.standard_normal((24, 64)) * np.exp2(rng.integers(-8, 8, (24, 1)))).astype(ml_dtypes.bfloat16)
    e4m3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    e2m1 = np.float64([0, 0.5, 1, 1.5, 2, 3, 4, 6])

    def power(limit):
        return lambda amax: np.exp2(np.ceil(np.log2(amax / limit)))

    def nearest_e4m3(amax):
        return (amax / 6).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)

    expected = {
        "fake_q8": lambda: float64_grid(x, 32, 1e-4, 448, power(448), e4m3),
        "fake_q4m": lambda: float64_grid(x, 32, 6 * 2.0**-126, 6, power(6), e2m1),
        "fake_q4n": lambda: float64_grid(x, 16, 6 * 2.0**-9, 6, nearest_e4m3, e2m1),
    }[name]()
    result = call(module, name, x)
    assert result.dtype == x.dtype
    np.testing.assert_array_equal(result.astype(np.float64), expected)
    wide = call(module, name, x.astype(np.float32))
    assert wide.dtype == np.float32
    np.testing.assert_array_equal(wide, result.astype(np.float32))  # bfloat16 holds every value exactly


# The twins.


@pytest.mark.parametrize("name, width", [("q8", 32), ("q4m", 32), ("q4n", 16)])
def test_twins_agree_on_every_bfloat16_maximum(name, width):
    x = every_scale_block(width)
    for function in (f"quantize_{name}", f"fake_{name}"):
        assert_same_bits(call(quantization, function, x), call(quantization_numpy, function, x))


@pytest.mark.parametrize("name", ["quantize_index_key_fp8", "quantize_index_query_fp8"])
def test_index_twins_agree_on_every_bfloat16_maximum(name):
    x = every_scale_block(16)
    assert_same_bits(call(quantization, name, x), call(quantization_numpy, name, x))


@settings(max_examples=150, deadline=None)
@given(
    arrays.arrays(np.uint32, (2, 32), elements=st.integers(0, 2**32 - 1)),
    st.sampled_from(
        ["fake_q8", "fake_q4m", "fake_q4n", "quantize_q8", "quantize_q4m", "quantize_q4n", "encode_e2m1", "encode_e4m3"]
    ),
)
@example(np.full((2, 32), 0x7F800000, np.uint32), "fake_q8")
@example(np.array([[0xFF800000, *range(31)], [0x7F800000, *range(0x7F000000, 0x7F00001F)]], np.uint32), "fake_q8")
def test_twins_agree_on_any_float32(bits, name):
    x = bits.view(np.float32)
    assert_same_bits(call(quantization, name, x), call(quantization_numpy, name, x))


ENCODERS = (
    "quantize_q8",
    "quantize_q4m",
    "quantize_q4n",
    "quantize_index_key_fp8",
    "quantize_index_query_fp8",
    "fake_q8",
    "fake_q4m",
    "fake_q4n",
)


@pytest.mark.parametrize("name", ENCODERS)
def test_twins_agree_on_a_large_array_of_any_bits(name):
    """Vector code of a compiler differs from its scalar code, in NaN above all."""
    x = np.random.default_rng(3).integers(0, 2**32, (20_000, 32), np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        assert_same_bits(call(quantization, name, x), call(quantization_numpy, name, x))


def test_rounding_survives_being_decoded_at_once():
    """Encode and decode in one compiled function, where a cast to a narrow float and back could be deleted."""
    x = np.random.default_rng(4).standard_normal(4096).astype(np.float32)

    @jax.jit
    def there_and_back(x):
        return quantization.decode_e4m3(quantization.encode_e4m3(x * 1.3)) * 2

    expected = (x * np.float32(1.3)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * 2
    np.testing.assert_array_equal(np.asarray(there_and_back(x)), expected)
    program = there_and_back.lower(x).as_text()
    assert "f8E4M3FN" not in program


@pytest.mark.parametrize("name", ["fake_q8", "fake_q4m", "fake_q4n"])
def test_a_nan_stays_visible(name):
    x = np.ones((2, 32), np.float32)
    x[1, 5] = np.nan
    for module in (quantization, quantization_numpy):
        result = call(module, name, x)
        assert np.isnan(result[1, 5]) and (result[0] == result[0, 0]).all() and np.isfinite(result[0]).all()


# Stored weights.


def test_dequantization_twins_agree_on_every_code_and_scale():
    codes = np.tile(np.arange(256, dtype=np.uint8), (256 * 32, 1))[:, :256]
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    dense = call(quantization, "dequantize_dense", codes, scales)
    assert_same_bits(dense, call(quantization_numpy, "dequantize_dense", codes, scales))
    rows, row_scales = codes[::32], scales
    assert_same_bits(call(quantization, "dequantize_rows", rows, row_scales), dense[::32])
    packed = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    expert_scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 16, axis=1)
    expert = call(quantization, "dequantize_expert", packed, expert_scales)
    assert_same_bits(expert, call(quantization_numpy, "dequantize_expert", packed, expert_scales))
    exact = np.exp2(np.arange(256) - 127.0)
    assert (dense[0, 0x7E], dense[0, 0x01]) == (448 * exact[0], 2.0**-9 * exact[0])
    assert np.isnan(dense[255 * 32]).all() and np.isnan(expert[255]).all()


def test_dense_blocks_may_be_cut_at_the_edge():
    codes = np.full((40, 50), 0x38, np.uint8)
    scales = np.uint8([[127, 128], [129, 130]])
    for module in (quantization, quantization_numpy):
        result = call(module, "dequantize_dense", codes, scales)
        assert (result[0, 0], result[0, 49], result[39, 0], result[39, 49]) == (1, 2, 4, 8)


def test_a_ragged_last_axis_is_refused():
    for module in (quantization, quantization_numpy):
        with pytest.raises(ValueError, match="40 elements, not a multiple of the block of 32"):
            module.quantize_q8(np.zeros((1, 40), np.float32))
