"""Arguments replaced in place."""

import jax
import jax.numpy as jnp
import numpy as np

from v41jax.staging import StagedArguments


def test_arguments_are_replaced_where_they_lie():
    staged = StagedArguments()
    first = staged.place("a", {"x": np.arange(4096, dtype=np.int32), "y": (np.float32(2.0), jnp.ones(8, bool))})
    place = first["x"].unsafe_buffer_pointer()
    np.testing.assert_array_equal(first["x"], np.arange(4096))
    other = staged.place("b", {"x": np.zeros(4096, np.int32)})
    second = staged.place("a", {"x": np.arange(4096, dtype=np.int32)[::-1], "y": (np.float32(3.0), np.zeros(8, bool))})
    jax.block_until_ready(second)
    assert second["x"].unsafe_buffer_pointer() == place and first["x"].is_deleted()
    np.testing.assert_array_equal(second["x"], np.arange(4096)[::-1])
    assert float(second["y"][0]) == 3.0 and not second["y"][1].any()
    np.testing.assert_array_equal(other["x"], 0)


def test_what_a_caller_holds_is_not_taken_from_it():
    staged, mine = StagedArguments(), jnp.arange(3)
    for _ in range(2):
        staged.place("a", mine)
    np.testing.assert_array_equal(mine, [0, 1, 2])
