"""The ways a Mosaic kernel runs on a CPU: as plain operations, and with a TPU's memory, copies and races simulated."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from pallas_kernels import backend

MODES = ("generic", "simulated")


@contextlib.contextmanager
def interpretation(mode: str) -> Iterator[Any]:
    """The `interpret` argument of a mode; a race that was seen fails the test. Wait for results inside.

    Copies of the simulation happen when they are waited for, and memory starts as NaN, so that a missing wait shows.
    """
    if mode == "generic":
        yield True
        return
    pltpu = backend.tpu()
    try:
        yield pltpu.InterpretParams(detect_races=True, dma_execution_mode="on_wait", uninitialized_memory="nan")
        simulation = importlib.import_module("jax._src.pallas.mosaic.interpret.interpret_pallas_call")
        assert simulation.races is not None, "nothing was simulated; wait for the result inside"
        assert not simulation.races.races_found, "the simulation saw a race"
    finally:
        pltpu.reset_tpu_interpret_mode_state()
