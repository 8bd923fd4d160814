"""Host arrays packed into one argument come out of it bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from v41jax.packed_arguments import Packing


def test_every_type_and_shape_comes_back_to_the_bit():
    tree = {
        "int": np.array([[-(2**31), 2**31 - 1, 0]], np.int32),
        "unsigned": np.array([0, 2**32 - 1, 2**31], np.uint32),
        "float": np.array([0x80000000, 1, 0x7FC00001, 0xFF800000], np.uint32).view(np.float32),
        "bool": np.array([True, False, True]),
        "scalar": np.bool_(True),
        "empty": np.zeros((3, 0), np.int32),
        "none": None,
    }
    packing = Packing(tree)
    words = packing.pack(tree)
    assert words.dtype == np.int32
    assert words.shape == (packing.words,) == (3 + 3 + 4 + 3 + 1,)
    unpacked = jax.jit(packing.unpack)(words)
    assert unpacked["none"] is None
    for name, wanted in tree.items():
        if wanted is not None:
            got = np.asarray(unpacked[name])
            assert got.dtype == wanted.dtype and got.shape == np.shape(wanted), name
            assert got.tobytes() == np.asarray(wanted).tobytes(), name


def test_arrays_of_other_types_and_shapes_are_refused():
    with pytest.raises(TypeError, match="uint8"):
        Packing([np.zeros(3, np.uint8)])
    with pytest.raises(TypeError, match="float64"):
        Packing([np.zeros(3)])
    packing = Packing([jax.ShapeDtypeStruct((3,), jnp.int32)])
    with pytest.raises(ValueError, match="not those of the shapes"):
        packing.pack([np.zeros(4, np.int32)])
    with pytest.raises(ValueError, match="not those of the shapes"):
        packing.pack([np.zeros(3, np.int32), np.zeros(3, np.int32)])


@pytest.mark.parametrize("given", [np.int64, np.uint32, np.float32, bool])
def test_arrays_are_not_converted(given):
    """A cast would wrap large ids and cut fractions, where a program refuses its arguments."""
    packing = Packing([jax.ShapeDtypeStruct((3,), jnp.int32)])
    with pytest.raises(TypeError, match=f"{np.dtype(given)} where the packing was made of int32"):
        packing.pack([np.ones(3, given)])
