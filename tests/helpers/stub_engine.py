"""A scheduler over the stub runner with small defaults, and the tokens it must produce."""

from __future__ import annotations

import dataclasses

import numpy as np

from scheduler.runtime_config import EngineConfig, validate_runtime_config
from scheduler.scheduler import Scheduler
from scheduler.sequence import SamplingParams
from tests.helpers.driver import Driver
from tests.helpers.scenario import SMALL_VIEW
from tests.helpers.stub_runner import StubRunner, compress_ids, expected_tokens

PAGE = WINDOW = 32
VIEW = dataclasses.replace(SMALL_VIEW, eos_token_ids=(1,))


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
