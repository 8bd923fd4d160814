"""Frequencies, tables and rotation against the published vectors of the model specification."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rotation import rotate
from v41jax.layers.rope import RopeTable, at_positions, build_table, plain_frequencies, yarn_frequencies
from v41jax.presets import preset

YARN = """
3f800000 3f300a3a 3ef21c1f 3ea67d01 3e64f92e 3e1d7475 3dd88cb4 3d94e963
3d4ccccd 3d0cd4fb 3cc1b019 3c8530ce 3c372dbf 3bfbed88 3bad3d5e 3b6e4237
3b147ae1 3ab714e0 3a5ebdb6 3a0530ce 399bb3af 39305978 38be904d 383e9b5f
37a3d70c 36b443d0 3677eba6 362a7be8 35ea77ff 35a13bdc 355dbf30 35187c4d
"""
PLAIN = """
3f800000 3f3ff911 3f0ff59a 3ed7e89b 3ea1e89b 3e72d423 3e361887 3e088d77
3dcccccd 3d99940d 3d6655c2 3d2cba15 3d0186e3 3cc2434f 3c91ad39 3c5a7bf2
3c23d70a 3bf5b9b0 3bb8449c 3b8a2e77 3b4f3e38 3b1b690d 3ae91528 3aaec98e
3a83126f 3a44948c 3a136a16 39dd1725 39a5cb60 3978a815 393a7753 390bd472
"""


def bits(text: str) -> np.ndarray:
    return np.array([int(word, 16) for word in text.split()], np.uint32).view(np.float32)


def test_frequencies_are_the_published_bits():
    text = preset("v4.1-flash").text
    assert np.array_equal(yarn_frequencies(text), bits(YARN))
    assert np.array_equal(plain_frequencies(text.rope_theta, 64), bits(PLAIN))


@pytest.mark.parametrize(
    ("position", "pair", "cos", "sin"),
    [
        (1, 3, 0.947595656, 0.319472194),
        (127, 3, -0.897734284, -0.440537393),
        (100000, 3, -0.190167516, 0.98175168),
        (1000000, 20, -0.0971240923, 0.995272279),
    ],
)
def test_table_entries_are_the_published_ones(position, pair, cos, sin):
    table = build_table(bits(YARN)[pair : pair + 1], position + 1)
    assert (table.cos[position, 0], table.sin[position, 0]) == (np.float32(cos), np.float32(sin))


def test_only_the_trailing_pairs_rotate():
    table = build_table(plain_frequencies(100.0, 4), 8)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2, 10)), jnp.float32)
    angles = at_positions(table, jnp.array([0, 5, 7]))
    y = np.asarray(rotate(x, *angles))
    assert np.array_equal(y[..., :6], x[..., :6]) and np.array_equal(y[0], x[0])
    for row, position in enumerate((0, 5, 7)):
        for pair in range(2):
            turned = complex(table.cos[position, pair], table.sin[position, pair])
            for head in range(2):
                a, b = x[row, head, 6 + 2 * pair], x[row, head, 7 + 2 * pair]
                wanted = complex(a, b) * turned
                assert np.allclose(y[row, head, 6 + 2 * pair : 8 + 2 * pair], (wanted.real, wanted.imag), atol=1e-6)


def test_positions_outside_the_table_are_clamped():
    table = RopeTable(jnp.arange(4.0)[:, None], jnp.zeros((4, 1)))
    assert at_positions(table, jnp.array([-1, 9])).cos[:, 0].tolist() == [0, 3]
