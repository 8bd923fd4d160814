"""What outlives a phase: Orbax states beside the run, small snapshots of masters that fit anywhere, the log."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp

from training.optimizer import TrainState
from training.weights import Masters

SNAPSHOT_BYTES = 15 * 2**20
"""Largest file of a snapshot."""


class States:
    """The states of one phase under `directory`; saving is atomic, the newest two are kept."""

    def __init__(self, directory: Path):
        self._manager = ocp.CheckpointManager(
            directory.absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
        )

    def newest(self, like: TrainState) -> TrainState | None:
        """The newest state, with the structure of `like`; None before the first."""
        step = self._manager.latest_step()
        if step is None:
            return None
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        return self._manager.restore(step, args=ocp.args.StandardRestore(abstract))

    def save(self, state: TrainState) -> None:
        """Saves and waits until the files are complete."""
        step = int(state.step)
        if step != self._manager.latest_step():
            self._manager.save(step, args=ocp.args.StandardSave(state))
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Ends the background threads."""
        self._manager.close()


def save_snapshot(directory: Path, name: str, masters: Masters, step: int) -> None:
    """Masters in bfloat16, as `{name}-{number}.npz`, each below `SNAPSHOT_BYTES`, and the step in `{name}.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    parts: list[dict[str, Any]] = [{}]
    size = 0
    for key, master in masters.items():
        value = np.asarray(master).astype(ml_dtypes.bfloat16).view(np.uint16)
        if size + value.nbytes > SNAPSHOT_BYTES:
            parts.append({})
            size = 0
        parts[-1][key] = value
        size += value.nbytes
    for number, part in enumerate(parts):
        np.savez(directory / f"{name}-{number}.npz", **part)
    (directory / f"{name}.json").write_text(json.dumps({"step": step}) + "\n", encoding="utf-8")


def snapshot_step(directory: Path, name: str) -> int:
    """The step a snapshot was taken at."""
    return int(json.loads((directory / f"{name}.json").read_text(encoding="utf-8"))["step"])


def load_snapshot(directory: Path, name: str) -> Masters | None:
    """What `save_snapshot` wrote, as float32; None when there is none."""
    masters: Masters = {}
    for path in sorted(directory.glob(f"{name}-*.npz")):
        with np.load(path) as archive:
            for key in archive.files:
                masters[key] = jax.numpy.asarray(archive[key].view(ml_dtypes.bfloat16).astype(np.float32))
    return masters or None


class Log:
    """JSON lines to a file and, shorter, to the terminal."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._began = time.perf_counter()

    def __call__(self, **values: Any) -> None:
        """Appends one line with the seconds since the log was opened."""
        line = {"seconds": round(time.perf_counter() - self._began, 2), **values}
        with open(self._path, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
