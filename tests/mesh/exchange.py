"""Runs the ragged exchange of expert rows over meshes of eight virtual devices, for `test_exchange`.

`python -m tests.mesh.exchange OUT`, in a process with eight devices. OUT receives the sums of all `cases` on all
`MESHES`, [data n, model, D] by `model` column, as `MESH/CASE`, and of real experts as `real/CASE`; and the collectives
of the programs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from pallas_kernels.grouped_experts import grouped_experts
from v41jax.hlo_collectives import count_collectives
from v41jax.layers.collectives import DATA, MODEL, Parallel, first_expert
from v41jax.layers.expert_exchange import ragged
from v41jax.sharding import make_mesh

Array = jax.Array

ROWS, EXPERTS, CHOSEN, WIDTH, INNER, PLACES = 40, 32, 4, 64, 32, 8
HELD = EXPERTS // 8
MESHES = {"4x2": Parallel(4, 2, "data_model"), "8x1:quantized": Parallel(8, 1, "data_model")}
WATCHED = np.array([3, 4, 11, 39, 40, 77])
"""Rows of `random` that are elsewhere, among others, in `moved`: where `MOVED` says."""
MOVED = np.array([0, 9, 38, 24, 79, 41])


class Case(NamedTuple):
    """Inputs of all data shards.

    Attributes:
      rows: [data n, D] float32, on the Q8 grid; NaN where not valid.
      experts: [data n, k] int32, ascending.
      factors: [data n, k] float32, powers of two, so that only sums round.
      valid: [data n] bool.
    """

    rows: np.ndarray
    experts: np.ndarray
    factors: np.ndarray
    valid: np.ndarray


def random_case(seed: int, shards: int) -> Case:
    """Rows that choose any experts; every fifth is padding."""
    random = np.random.default_rng(seed)
    count = shards * ROWS
    valid = np.arange(count) % 5 != 2
    # Integers up to 15 times one scale a block have exact E4M3 codes.
    rows = random.integers(-15, 16, (count, WIDTH)) * np.float32(2.0) ** random.integers(-9, 9, (count, 1))
    experts = np.sort(np.argsort(random.random((count, EXPERTS)), axis=1)[:, :CHOSEN], axis=1)
    factors = 2.0 ** random.integers(-14, 14, (count, CHOSEN))
    rows = np.where(valid[:, None], rows, np.nan).astype(np.float32)
    return Case(rows, experts.astype(np.int32), factors.astype(np.float32), valid)


def cases(shards: int) -> dict[str, Case]:
    """All of them for a number of data shards."""
    random = random_case(1, shards)
    full = np.nan_to_num(random.rows, nan=0.5)
    last = np.broadcast_to(np.arange(EXPERTS - CHOSEN, EXPERTS, dtype=np.int32), random.experts.shape)
    crowded = Case(full, last, random.factors, np.ones_like(random.valid))
    moved = Case(*(field.copy() for field in (full, last, random.factors, crowded.valid)))
    for to, of in zip(moved, random, strict=True):
        to[MOVED] = of[WATCHED]
    idle = random._replace(rows=np.full_like(random.rows, np.nan), valid=np.zeros_like(random.valid))
    return {"random": random, "crowded": crowded, "moved": moved, "idle": idle}


def scales() -> np.ndarray:
    """What `scaled` multiplies by for every expert, [E] float32."""
    return (2.0 ** np.random.default_rng(2).integers(-9, 9, EXPERTS)).astype(np.float32)


def real_weights() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """w1, w3 [E, F, D] and w2 [E, D, F], float32."""
    random = np.random.default_rng(3)
    shapes = ((EXPERTS, INNER, WIDTH), (EXPERTS, INNER, WIDTH), (EXPERTS, WIDTH, INNER))
    return tuple(random.standard_normal(shape).astype(np.float32) / 8 for shape in shapes)


def scaled(rows: Array, ids: Array, weights: Array, valid: Array, scale: Array) -> Array:
    """Experts that multiply by a power of two."""
    total = jnp.zeros(rows.shape, jnp.float32)
    for column in range(ids.shape[1]):
        served = valid & (ids[:, column] >= 0) & (ids[:, column] < HELD)
        factor = weights[:, column] * scale[jnp.clip(ids[:, column], 0, HELD - 1)]
        total += jnp.where(served[:, None], rows * factor[:, None], 0)
    return total


def real(rows: Array, ids: Array, weights: Array, valid: Array, *matrices: Array) -> Array:
    """Experts of the operation."""
    options = {"swiglu_limit": 0.0, "quantize_hidden": False, "valid": valid, "implementation": "xla"}
    return grouped_experts(rows, ids, weights, *matrices, **options)


def program(parallel: Parallel, serve: Callable[..., Array], arrays: Sequence[np.ndarray], quantized: bool) -> Any:
    """The compiled exchange of all shards; its arguments: a `Case`, and the experts' arrays [E, ...], like these."""

    def local(rows: Array, experts: Array, factors: Array, valid: Array, *weights: Array) -> Array:
        def here(rows: Array, ids: Array, factors: Array, valid: Array) -> Array:
            first = first_expert(HELD, parallel)
            mine = [jax.lax.dynamic_slice_in_dim(weight, first, HELD) for weight in weights]
            return serve(rows, ids, factors, valid, *mine)

        options = {"held": HELD, "places": PLACES, "quantized": quantized, "parallel": parallel}
        return ragged(rows, experts, factors, valid, here, **options)[:, None]

    def whole(case: Case, *weights: Array) -> Array:
        spec = PartitionSpec(DATA)
        return jax.shard_map(
            local,
            mesh=make_mesh(parallel),
            in_specs=(*[spec] * len(case), *[PartitionSpec()] * len(weights)),
            out_specs=PartitionSpec(DATA, MODEL),
            check_vma=False,
        )(*case, *weights)

    inputs = cases(parallel.data)["random"]
    return jax.jit(whole).lower(inputs, *arrays).compile()


def main() -> None:
    results: dict[str, Any] = {}
    for name, parallel, serve, arrays in (
        *((name, parallel, scaled, (scales(),)) for name, parallel in MESHES.items()),
        ("real", MESHES["4x2"], real, real_weights()),
    ):
        run = program(parallel, serve, arrays, quantized=name.endswith("quantized"))
        results[f"{name}/collectives"] = json.dumps([one._asdict() for one in count_collectives(run.as_text())])
        for case, inputs in cases(parallel.data).items():
            results[f"{name}/{case}"] = np.asarray(run(inputs, *arrays))
    np.savez(sys.argv[1], **results)


if __name__ == "__main__":
    main()
