"""The decode kernel of NVIDIA GPUs: its meaning on ragged, poisoned rows, how it widens rows, and when it is taken."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.arithmetic import in_words
from pallas_kernels.grouped_experts.widening import e2m1_cuda
from pallas_kernels.rotation import rotate
from pallas_kernels.sparse_attention import decode, row_widening, triton
from pallas_kernels.triton_widening import power_bfloat16
from tests.pallas_kernels import ptx
from tests.pallas_kernels.attention_oracle import attention_case, attention_oracle, relative_error
from v41jax import quantization_numpy as quantization

LIMIT = 3e-3
CONFIGS = [
    decode.Config(keys=16, cuts=2, splits=1, num_warps=4, num_stages=3),
    decode.Config(keys=32, cuts=1, splits=1, num_warps=8, num_stages=2),
    decode.Config(keys=16, cuts=2, splits=3, num_warps=4, num_stages=2),
]
STORED = {"plain": ("bf16", "bf16"), "packed": ("fp4", "fp8")}


def decode_case(seed, storage="plain", **options):
    main_format, window_format = STORED[storage]
    shape = {"rows": 4, "selected": 40, "page_rows": 16, "columns": 4, "window": 24, "ring": 27, "padding": 1}
    kind = {"width": 256, "rotated": 32, "dtype": jnp.bfloat16, "fresh_rows": False}
    formats = {"main_format": main_format, "window_format": window_format}
    return attention_case(seed, **{"heads": 64, **shape, **kind, **formats, **options})


def attend(case, config, **options):
    run = functools.partial(triton.sparse_attention, **case.options, config=config, interpret=True, **options)
    return jax.jit(run)(*case.arrays)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("storage", STORED)
def test_decode_equals_float64_whatever_unused_memory_holds(config, storage):
    case = decode_case(1, storage)
    found = attend(case, config)
    assert relative_error(found, attention_oracle(case)) < LIMIT
    assert not np.asarray(found, np.float32)[4:].any()


@pytest.mark.parametrize("config", CONFIGS)
def test_packed_rows_differ_from_their_bfloat16_values_by_the_order_of_sums_only(config):
    plain, packed = (np.asarray(attend(decode_case(2, storage), config), np.float32) for storage in STORED)
    # A score that is summed in another order moves a rounding here and there; wrong values would move all results.
    assert (plain != packed).mean() < 1e-3
    np.testing.assert_allclose(packed, plain, rtol=2**-7, atol=2**-12)


@pytest.mark.parametrize("storage", STORED)
@pytest.mark.parametrize("options", [{"selected": 0}, {"selected": 23, "rows": 1}, {"sink_spread": 300.0}])
def test_missing_lists_odd_lists_and_large_sinks(options, storage):
    for config in (CONFIGS[0], CONFIGS[2]):
        case = decode_case(3, storage, **options)
        assert relative_error(attend(case, config), attention_oracle(case)) < LIMIT


def test_a_row_without_a_request_and_without_a_sink_is_zero():
    case = decode_case(4)
    case.arrays[1] = jnp.full(64, -jnp.inf)
    for config in CONFIGS:
        assert not np.asarray(attend(case, config), np.float32)[4:].any()


def test_rings_and_sinks_of_stacks_and_a_query_that_is_not_rotated():
    case = decode_case(5, "packed", heads=128)
    plain = attend(case, CONFIGS[0])
    query, sink, *rest = case.arrays
    rings = jnp.concatenate([jnp.full_like(rest[6], 255)] * 2 + [rest[6]])
    turned_back = rotate(jnp.asarray(query, jnp.float32), rest[12], -rest[13]).astype(jnp.bfloat16)
    again = rotate(turned_back, rest[12], rest[13])
    case.arrays[:] = [again, *case.arrays[1:]]
    expected = attend(case, CONFIGS[0])
    assert relative_error(plain, np.asarray(expected, np.float64)) < 0.1
    case.arrays[:] = [turned_back, jnp.stack([sink + 1, sink, sink - 1]), *rest[:6], rings, *rest[7:]]
    found = attend(case, CONFIGS[0], layer=1, ring_offset=2 * rest[6].shape[0], rotate_query=True)
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))


@pytest.mark.parametrize("byte", range(4))
@pytest.mark.parametrize("scale", [90, 127, 160])
def test_cuda_instructions_widen_every_window_byte(byte, scale):
    stored = np.stack([np.roll(np.arange(256), 7 * place) for place in range(4)], axis=1).astype(np.uint8)
    words = stored.reshape(-1).view(np.uint32)
    factor = np.asarray(power_bfloat16(jnp.full(256, scale, jnp.uint8))).view(np.uint32)
    found = ptx.run(row_widening.e4m3_cuda(byte), {"$1": words[::2], "$2": words[1::2], "$3": factor})["$0"]
    codes = stored[:, byte]
    expected = np.where(codes & 127 == 127, np.where(codes > 127, -480.0, 480.0), quantization.decode_e4m3(codes))
    expected = expected.astype(np.float64) * 2.0 ** (scale - 127 - row_widening.ROW_POWER)
    np.testing.assert_array_equal(found.view(ml_dtypes.bfloat16).astype(np.float64), expected)


@pytest.mark.parametrize("code", range(4))
def test_cuda_instructions_widen_main_codes_by_every_scale(code):
    scales = np.arange(127, dtype=np.uint8)
    factors = np.asarray(row_widening.main_factors(jnp.asarray(scales, jnp.uint16)))
    for nibble in range(16):
        words = np.full(2 * len(scales), nibble << (4 * code) | 0xA5A5 & ~(15 << (4 * code)), np.uint16).view(np.uint32)
        operands = {"$1": words, "$2": np.repeat(factors, 2).view(np.uint32)}
        found = ptx.run(e2m1_cuda(4 * code, 4 * code + 3), operands)["$0"].view(ml_dtypes.bfloat16)[::2]
        value = quantization.decode_e2m1(np.uint8(nibble)) * quantization.decode_e4m3(scales).astype(np.float64)
        np.testing.assert_array_equal(found.astype(np.float64), value * 2.0**-row_widening.ROW_POWER)


def test_plain_operations_widen_rows_in_the_order_of_their_dims():
    x = np.random.default_rng(0).normal(size=(3, 256)).astype(np.float32)
    codes, scales = quantization.quantize_q4n(x)
    words, factors = (in_words(jnp.asarray(part), jnp.uint16) for part in (quantization.pack_nibbles(codes), scales))
    found = row_widening.woven(list(row_widening.main_pieces(words, factors, False))).astype(jnp.float32)
    np.testing.assert_array_equal(found * 2.0**row_widening.ROW_POWER, quantization.fake_q4n(x))
    codes, scales = quantization.quantize_q8(x)
    words, factors = (in_words(jnp.asarray(part), jnp.uint32) for part in (codes, scales))
    found = row_widening.woven(list(row_widening.window_pieces(words, factors, False))).astype(jnp.float32)
    np.testing.assert_array_equal(found * 2.0**row_widening.ROW_POWER, quantization.fake_q8(x))


@pytest.mark.parametrize(
    ("rows", "packed", "expected"),
    [
        *((4, False, None), (8, False, (64, 2, 5)), (64, False, (32, 2, 1)), (128, False, (64, 1, 1))),
        *((129, False, None), (8, True, None), (64, True, (64, 2, 1)), (128, True, (64, 1, 1))),
    ],
)
def test_the_kernel_is_taken_where_it_was_timed_to_be_faster(rows, packed, expected):
    config = decode.config_for(rows, 64, 640, packed)
    assert (config and (config.keys, config.cuts, config.splits)) == expected


def test_shapes_that_it_cannot_run_are_refused():
    case = decode_case(6)
    query, _, selected, _, main, _, _, _, ring, fresh = case.arrays[:10]
    asked = (query, selected, main, ring, fresh, 24, False)
    assert decode.fits(*asked)
    for place, wrong in ((0, query[:, :20]), (0, query[..., :128]), (4, query[:, 0]), (5, 28)):
        assert not decode.fits(*asked[:place], wrong, *asked[place + 1 :])
    odd = jnp.zeros((2, 4, 66), jnp.uint8)
    assert not decode.fits(query, selected, odd, odd, fresh, 4, True)
