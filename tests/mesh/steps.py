"""Runs a few requests through the sharded forward on virtual devices: prefill in two chunks, then greedy decode.

To be run in a process of its own with eight devices, see `processes`:
`python -m tests.mesh.steps CHECKPOINT OUT MESH...`, a mesh as `DATAxMODEL:ARRANGEMENT[:ragged][:quantized]`. The file
OUT receives for every mesh the logits of all rows, the tokens, and the collectives of its programs by phase; of a
quantized one the first chunk's logits and its prefill program only.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scheduler.buckets import StepShape
from scheduler.pools import allocate, poison
from scheduler.scheduled_batch import Phase
from v41jax.engram_hashing import history_before
from v41jax.full_forward import LoadedModel, compressed_of, engram_rows_of, load_model
from v41jax.hlo_collectives import count_collectives
from v41jax.layers.collectives import Parallel
from v41jax.mesh_forward import mesh_forward
from v41jax.precision import Precision
from v41jax.sharding import join_engram_rows, join_steps, make_mesh, pool_specs, shardings, weight_specs
from v41jax.spans import Span, batch_of
from v41jax.step_arrays import empty_step

LENGTHS = (70, 41, 65, 38)
"""Prompts: several pages and selections that prune; the chunks below cross the ring."""
FIRST_CHUNK = 35
NEW_TOKENS = 4
PAGES_EACH = 4
ROWS, DECODE_ROWS = 160, 8


class MeshModel:
    """One checkpoint on one mesh, with its pools."""

    def __init__(self, model: LoadedModel, parallel: Parallel):
        self.model = model
        self.parallel = parallel
        self.mesh = make_mesh(parallel)
        self.setup = dataclasses.replace(model.setup, parallel=parallel)
        self.params = jax.device_put(model.params, shardings(self.mesh, weight_specs(model.params, parallel)))
        pools = poison(allocate(model.setup.geometry, len(LENGTHS) * PAGES_EACH * parallel.data, 4 * parallel.data))
        self.pools = jax.device_put(pools, shardings(self.mesh, pool_specs(pools, parallel)))
        self.programs: dict[str, Any] = {}

    def run(self, phase: str, shards: list[list[Span]], rows: int) -> np.ndarray:
        """Logits [shards, rows, V] of one step; a shard without spans runs padding."""
        geometry = self.model.setup.geometry
        bucket = {"rows": rows, "requests": 4, "columns": PAGES_EACH}
        idle = empty_step(StepShape(Phase.PREFILL, rows, 4, PAGES_EACH, rows, rows, False), geometry)
        batches = [batch_of(spans, geometry, **bucket) if spans else idle for spans in shards]
        engram = [engram_rows_of(self.model.setup, self.model.lookup, batch) for batch in batches]
        arguments = (self.params, self.pools, join_steps(batches), join_engram_rows(engram))
        if phase not in self.programs:
            step = functools.partial(mesh_forward, mesh=self.mesh, setup=self.setup, phase=phase)
            self.programs[phase] = jax.jit(step, donate_argnums=1).lower(*arguments).compile()
        self.pools, output = self.programs[phase](*arguments)
        assert not np.asarray(output.cursor_mismatch).any()
        return np.asarray(output.logits).reshape(len(shards), rows, -1)


def play(model: LoadedModel, parallel: Parallel, first_chunk_only: bool) -> dict[str, Any]:
    """All logits and tokens of the prompts on one mesh, and its programs' collectives."""
    place = MeshModel(model, parallel)
    random = np.random.default_rng(5)
    vocabulary = model.setup.config.text.vocab_size
    ids = [random.integers(3, vocabulary - 10, length).astype(np.int32) for length in LENGTHS]
    homes = [index % parallel.data for index in range(len(ids))]
    seats = [index // parallel.data for index in range(len(ids))]

    def span(index: int, start: int, stop: int) -> Span:
        compressed = compressed_of(model.lookup, ids[index], None)
        return Span(
            start=start,
            token_ids=ids[index][start:stop],
            compressed_ids=compressed[start:stop],
            slot=seats[index],
            pages=range(seats[index] * PAGES_EACH, (seats[index] + 1) * PAGES_EACH),
            history=history_before(compressed, start, model.setup.geometry.history_size),
        )

    logits: list[list[np.ndarray]] = [[] for _ in ids]

    def forward(phase: str, pieces: list[tuple[int, int]], rows: int) -> None:
        shards = [
            [span(index, *pieces[index]) for index in range(len(ids)) if homes[index] == shard]
            for shard in range(parallel.data)
        ]
        result = place.run(phase, shards, rows)
        filled = [0] * parallel.data
        for index, (start, stop) in enumerate(pieces):
            first = filled[homes[index]]
            logits[index].append(result[homes[index], first : first + stop - start])
            filled[homes[index]] += stop - start

    def result() -> dict[str, Any]:
        counted = {phase: count_collectives(program.as_text()) for phase, program in place.programs.items()}
        return {
            "logits": np.concatenate([np.concatenate(parts) for parts in logits]),
            "tokens": np.stack([tokens[-NEW_TOKENS:] for tokens in ids]),
            **{phase: json.dumps([entry._asdict() for entry in entries]) for phase, entries in counted.items()},
        }

    forward("prefill", [(0, FIRST_CHUNK)] * len(ids), ROWS)
    if first_chunk_only:
        return result()
    forward("prefill", [(FIRST_CHUNK, length) for length in LENGTHS], ROWS)
    for _ in range(NEW_TOKENS):
        for index in range(len(ids)):
            ids[index] = np.append(ids[index], np.argmax(logits[index][-1][-1]).astype(np.int32))
        forward("decode", [(len(tokens) - 1, len(tokens)) for tokens in ids], DECODE_ROWS)
    return result()


def parse(name: str) -> tuple[Parallel, bool]:
    """`DATAxMODEL:ARRANGEMENT[:ragged][:quantized]`; rows are gathered unless it says so."""
    size, arrangement, *rest = name.split(":")
    data, model = size.split("x")
    exchange = "ragged" if "ragged" in rest else "gather"
    return Parallel(int(data), int(model), arrangement, exchange), "quantized" in rest


def main() -> None:
    checkpoint, out, *meshes = sys.argv[1:]
    arrays = {}
    for name in meshes:
        parallel, quantized = parse(name)
        precision = Precision(jnp.dtype("float32"), quantized)
        form = "stored" if quantized else "dequantized"
        with load_model(Path(checkpoint), precision, max_model_len=128, form=form, packed=quantized) as model:
            for key, value in play(model, parallel, first_chunk_only=quantized).items():
                arrays[f"{name}/{key}"] = value
    np.savez(out, **arrays)


if __name__ == "__main__":
    main()
