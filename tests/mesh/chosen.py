"""Compiles the choice of tokens for meshes of virtual devices, and prints its collectives.

To be run in a process of its own with eight devices: `python -m tests.mesh.chosen DATAxMODEL...` prints for each mesh a
JSON list of collectives, of `OUTPUTS` rows a shard and `VOCABULARY` tokens.
"""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from v41jax.hlo_collectives import count_collectives
from v41jax.layers.collectives import DATA, MODEL, Parallel
from v41jax.runner import sampling_inputs
from v41jax.sampling import SamplingInputs, sample
from v41jax.sharding import make_mesh, shardings

OUTPUTS, VOCABULARY, FORBIDDEN = 8, 1024, 5


def choose(logits: jax.Array, inputs: SamplingInputs) -> jax.Array:
    """As the steps do it."""
    return sample(logits.at[:, FORBIDDEN].set(-jnp.inf), inputs)


def main() -> None:
    for name in sys.argv[1:]:
        parallel = Parallel(*map(int, name.split("x")))
        outputs, whole = OUTPUTS * parallel.data, PartitionSpec()
        arguments = (jax.ShapeDtypeStruct((outputs, VOCABULARY), jnp.float32), sampling_inputs([], outputs))
        specs = (PartitionSpec(DATA, MODEL), SamplingInputs(*[whole] * len(arguments[1])), whole)
        placed = shardings(make_mesh(parallel), specs)
        program = jax.jit(choose, in_shardings=placed[:2], out_shardings=placed[2]).lower(*arguments).compile()
        print(json.dumps([entry._asdict() for entry in count_collectives(program.as_text())]))


if __name__ == "__main__":
    main()
