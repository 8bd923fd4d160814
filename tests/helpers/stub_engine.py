"""A scheduler over the stub runner with small defaults, and the tokens it must produce."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from scheduler.runtime_config import EngineConfig, validate_runtime_config
from scheduler.scheduled_batch import Phase
from scheduler.scheduler import Scheduler
from scheduler.sequence import SamplingParams
from tests.helpers.driver import Driver
from tests.helpers.scenario import SMALL_VIEW
from tests.helpers.stub_runner import StubRunner, compress_ids, expected_tokens

PAGE = WINDOW = 32
VIEW = dataclasses.replace(SMALL_VIEW, eos_token_ids=(1,))
SWITCHES = [
    pytest.param({"encoder_swa_bounded_replay": encoder, "decoder_swa_bounded_replay": decoder}, id=name)
    for (encoder, decoder), name in zip(
        itertools.product((True, False), (True, False)), ("both", "encoder", "decoder", "neither"), strict=True
    )
]
COPY = {"encoder_swa_bounded_replay": False}
OFF = {"encoder_swa_bounded_replay": False, "decoder_swa_bounded_replay": False}


def make_stub(scheduler):
    """A stub runner with the scheduler's pools."""
    manager = scheduler.manager
    images = manager.images.capacity if manager.images is not None else 0
    return StubRunner(scheduler.geometry, manager.pool.num_pages, manager.slots.num_slots, images)


def make_driver(*, mode="immediate", num_pages=64, view=VIEW, clock=None, **options) -> Driver:
    """An engine loop in the specification's gate configuration; `options` are `EngineConfig` fields."""
    values = {
        "kv_cache_block_size": PAGE,
        "max_num_batched_tokens": 2 * PAGE,
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "long_prefill_token_threshold": PAGE,
        "state_checkpoint_interval_tokens": PAGE,
        **options,
    }
    config = EngineConfig(**values)
    validate_runtime_config(config, view)
    extra = {} if clock is None else {"clock": clock}
    scheduler = Scheduler(
        config,
        view,
        config.geometry(view),
        num_pages,
        config.max_num_seqs,
        deferred=mode != "immediate",
        **extra,
    )
    return Driver(scheduler, make_stub(scheduler), mode=mode, compress_ids=compress_ids)


def prompt(length, seed=0):
    """Random ids that are neither special nor image ids."""
    return np.random.default_rng(seed).integers(20, 480, length).astype(np.int32)


def greedy(count, **changes):
    """Exactly `count` tokens."""
    return SamplingParams(max_tokens=count, ignore_eos=True, **changes)


def check_tokens(driver, request_id, ids, count, images=()):
    """The request finished with the tokens of an uninterrupted run."""
    done = driver.finished[request_id]
    assert done.reason == "max_tokens"
    assert list(done.tokens) == expected_tokens(ids, images, count)
    return done


def spans(driver, request_id):
    """(start, resume, end, is_final) of every prefill forward of a request."""
    found = []
    for batch in driver.log:
        if batch.phase is Phase.PREFILL and request_id in batch.request_ids:
            row = batch.request_ids.index(request_id)
            found.append(
                (int(batch.starts[row]), int(batch.resumes[row]), int(batch.ends[row]), bool(batch.is_final[row]))
            )
    return found


def restores(driver):
    """Images restored so far."""
    return sum(len(batch.ops.restores) for batch in driver.log)


def steps_until(driver, condition, limit=200):
    """Steps until `condition()` holds."""
    for _ in range(limit):
        if condition():
            return
        driver.step()
    raise AssertionError("the condition never held")
