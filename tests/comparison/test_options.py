"""The text form of a side, and every way to get it wrong."""

from pathlib import Path

import jax.numpy as jnp
import pytest

from v41jax.comparison.options import parse
from v41jax.layers.collectives import Parallel
from v41jax.precision import Precision

DEFAULT = Precision(jnp.bfloat16, activation_quantization=True)


def test_every_option():
    found = parse(
        "xla:dtype=float32,quant,packed,index=fp8,scores=bfloat16,weights=stored,chunks=33+7,replay=both,model=/m",
        DEFAULT,
    )
    assert found.kind == "xla" and found.packed and found.index_format == "fp8" and found.weights == "stored"
    assert found.precision == Precision(jnp.dtype("float32"), True, jnp.dtype("bfloat16"))
    assert found.chunks == (33, 7) and found.stops(50) == [33, 40, 47, 50]
    assert found.replay == "both" and found.model == Path("/m")
    assert parse("reference:only=main+window", DEFAULT).only == ("main", "window")
    assert parse("pallas", DEFAULT).weights == "stored"
    assert parse("pallas:weights=arranged", DEFAULT).weights == "arranged"
    assert parse("xla:mesh=4+experts", DEFAULT).parallel == Parallel(1, 4, "model")
    assert parse("reference", DEFAULT).precision == DEFAULT
    assert not parse("pallas:noquant", DEFAULT).precision.activation_quantization


def test_a_recording_names_its_precision():
    found = parse("npz:dir/run.npz@noquant.float32", DEFAULT)
    assert (found.file, found.prefix) == (Path("dir/run.npz"), "noquant.float32")
    assert found.precision == Precision(jnp.dtype("float32"), False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("torch", "a side begins with one of reference, xla, pallas, npz"),
        ("npz:", "names no file"),
        ("xla:index=int8,dtype=half", r"index=int8 must be one of fp4, fp8; dtype=half must be one of float32"),
        ("xla:chunks=3+x", "chunks=3\\+x must be whole numbers"),
        ("xla:fast", "unknown option 'fast'"),
        ("xla:packed,noquant", "packed rows hold quantized activations"),
        ("reference:quant,packed", "the reference has no packed rows or weight forms"),
        ("reference:only=main+keys", r"only=keys must be of activations, index, main, window, joined by \+"),
        ("xla:mesh=2x2", "mesh=2x2 must be a number of chips"),
        ("reference:mesh=2", "mesh= cuts a whole forward of the runtime"),
        ("pallas:mesh=2,weights=arranged", "weights=arranged are for one chip"),
        ("xla:only=main", "only= says what the reference quantizes"),
        ("reference:noquant,only=main", "only= says what the reference quantizes: it needs reference and quant"),
    ],
)
def test_what_is_wrong_is_said(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text, DEFAULT)
