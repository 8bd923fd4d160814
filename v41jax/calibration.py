"""Measures a calibration profile: what a step costs by rows, and how far the draft's confidences can be trusted.

Everything is measured with the engine that will use it: the same programs, the same host work, real requests.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence

import numpy as np

from scheduler.buckets import decode_ladder
from scheduler.scheduled_batch import Phase
from v41jax.confidence import Blocks, fit_temperatures, reliability, step_rates
from v41jax.confidence_profile import Identity, Profile, evidence_of
from v41jax.engine import Engine
from v41jax.engine_requests import Prompt

HELD_OUT = 1 / 3
"""Share of the requests that judge the temperatures fitted on the others."""


def measure_profile(engine: Engine, prompts: Sequence[Prompt], identity: Identity) -> Profile:
    """Runs prompts at every number of requests and proposals and fits a profile.

    Args:
      engine: built with `calibrates`; nothing runs on it.
      prompts: what is typical of the traffic; each is generated to its own limit. Temperatures are fitted on the full
        width, and judged on other prompts than they are fitted on: give at least two.
      identity: of the process, see `running_identity`.

    Raises:
      ValueError: the engine does not report confidences, or no block was verified.
    """
    drafts, config = engine.core.drafts, engine.config.of_shard()
    if drafts is None or not drafts.confidence:
        raise ValueError("calibration needs an engine with speculation that was built to calibrate")
    width = config.num_speculative_tokens
    measured = dict(_rates(engine, prompts, width))
    drafts.blocks = []
    _run(engine, prompts, width)
    recorded, drafts.blocks = drafts.blocks, None
    if not recorded:
        raise ValueError("no drafted block was verified: give prompts that generate more than one token")
    names = {name: number for number, name in enumerate(dict.fromkeys(block.request_id for block in recorded))}
    blocks = Blocks(
        confidences=np.stack([block.confidences for block in recorded]),
        offered=np.array([block.offered for block in recorded]),
        accepted=np.array([block.accepted for block in recorded]),
        requests=np.array([names[block.request_id] for block in recorded]),
    )
    fitted, judged = blocks.split(HELD_OUT)
    temperatures = fit_temperatures(fitted)
    last = config.max_num_seqs * (width + 1)
    return Profile(
        identity=identity,
        draft_width=width,
        max_num_seqs=config.max_num_seqs,
        sps_table=tuple(step_rates(list(measured), list(measured.values()), last).tolist()),
        sts_temperatures=tuple(temperatures.tolist()),
        evidence=evidence_of(blocks, measured, reliability(judged, np.ones(width)), reliability(judged, temperatures)),
    )


def _rates(engine: Engine, prompts: Sequence[Prompt], width: int) -> Iterator[tuple[int, float]]:
    """(rows of the largest data shard, decode steps per second), of several ways to fill as many rows the slowest."""
    slowest: dict[int, float] = {}
    for requests in decode_ladder(engine.config.of_shard().max_num_seqs):
        chosen = [prompts[index % len(prompts)] for index in range(requests * engine.config.data_shards)]
        for proposals in range(width + 1):
            _run(engine, chosen, proposals)  # compiles what is not compiled yet
            engine.core.step_times.clear()
            _run(engine, chosen, proposals)
            rows = requests * (proposals + 1)
            times = [
                step.plan + step.lookup + step.dispatch + step.wait
                for step in engine.core.step_times
                if step.phase is Phase.DECODE and step.rows == rows
            ]
            if times:
                rate = 1 / statistics.median(times)
                slowest[rows] = min(rate, slowest.get(rows, rate))
    yield from sorted(slowest.items())


def _run(engine: Engine, prompts: Sequence[Prompt], proposals: int) -> None:
    """Generates from prompts with a fixed number of proposals."""
    scheduler = engine.core.scheduler
    before = scheduler.verify_lengths
    scheduler.verify_lengths = lambda _, limits: [min(proposals, limit) for limit in limits]
    try:
        engine.generate([dataclasses.replace(prompt, arrival_step=0) for prompt in prompts])
    finally:
        scheduler.verify_lengths = before
