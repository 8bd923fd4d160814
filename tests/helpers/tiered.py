"""Schedulers with pages beyond the device: over the stub runner, with executors and tiers that misbehave on purpose."""

from __future__ import annotations

import random

import numpy as np

from scheduler.tiers.host import HostTier
from scheduler.tiers.keys import CacheIdentity
from scheduler.tiers.layout import TransferLayout, plane_spans
from scheduler.tiers.page_tiers import PageTiers
from scheduler.tiers.records import CorruptRecordError
from scheduler.tiers.store import TierStore
from tests.helpers.driver import Driver
from tests.helpers.stub_engine import make_driver
from tests.helpers.stub_runner import POISON

IDENTITY = CacheIdentity("model", "tokens", "layout", "computation")


class InlineExecutor:
    """Runs every job at once."""

    def submit(self, job, *arguments):
        job(*arguments)

    def shutdown(self, wait=True, *, cancel_futures=False):
        pass


class LateExecutor(InlineExecutor):
    """Runs jobs when told to, any number of turns late and in any order."""

    def __init__(self, rng: random.Random, rate: float):
        self._rng = rng
        self._rate = rate
        self._jobs: list = []

    def submit(self, job, *arguments):
        self._jobs.append((job, arguments))

    def tick(self):
        waiting, self._jobs = self._jobs, []
        self._rng.shuffle(waiting)
        for job, arguments in waiting:
            if self._rng.random() < self._rate:
                job(*arguments)
            else:
                self._jobs.append((job, arguments))

    def shutdown(self, wait=True, *, cancel_futures=False):
        jobs, self._jobs = self._jobs, []
        for job, arguments in () if cancel_futures else jobs:
            job(*arguments)


class FaultyTier(HostTier):
    """A host tier that loses pages, fails, reports damage and lies about what it has."""

    name = "faulty"

    def __init__(self, capacity: int, rng: random.Random, rate: float):
        super().__init__(capacity)
        self._rng = rng
        self._rate = rate

    def _fails(self, *errors: Exception) -> bool:
        if self._rng.random() >= self._rate:
            return False
        error = self._rng.choice((None, *errors))
        if error is not None:
            raise error
        return True

    def contains(self, key):
        return super().contains(key) != self._fails(OSError("no answer"))

    def get(self, key, length):
        lost = self._fails(OSError("no answer"), CorruptRecordError("damaged"), FileNotFoundError("lost"))
        return None if lost else super().get(key, length)

    def put(self, key, payload):
        return 0 if self._fails(OSError("full")) else super().put(key, payload)


class StubMemory:
    """`PageMemory` of a `StubRunner`; like a device, it reads when asked and not when waited for."""

    def __init__(self, runner):
        self._runner = runner
        _, ring, _ = runner.image_rings.shape[1:]
        page, history = runner.value.shape[1], runner.image_cursor.shape[1]
        self.layout = TransferLayout(
            "stub",
            plane_spans([("value", (page,), "int64", 8 * page), ("pair", (page // 2,), "int64", 4 * page)]),
            plane_spans([("window", (2, ring, 2), "int64", 32 * ring), ("cursor", (history,), "int64", 8 * history)]),
        )

    def read_pages(self, pages):
        found = [self._runner.value[page].tobytes() + self._runner.pair[page].tobytes() for page in pages]
        assert all(np.int64(POISON).tobytes() not in data for data in found), "a page without content is saved"
        return lambda: found

    def write_pages(self, contents):
        for page, data in contents.items():
            values = np.frombuffer(data, np.int64)
            size = self._runner.value.shape[1]
            self._runner.value[page], self._runner.pair[page] = values[:size], values[size:]

    def read_images(self, images):
        runner = self._runner
        found = [runner.image_rings[row].tobytes() + runner.image_cursor[row].tobytes() for row in images]
        return lambda: found

    def write_images(self, contents):
        for row, data in contents.items():
            values = np.frombuffer(data, np.int64)
            rings = self._runner.image_rings[row]
            self._runner.image_rings[row] = values[: rings.size].reshape(rings.shape)
            self._runner.image_cursor[row] = values[rings.size :]


class TieredDriver(Driver):
    """A driver whose engine loop has the calls that tiers need; time advances by one a step."""

    now = 0.0
    executors: tuple = ()

    def attach(self, tiers):
        self.tiers = tiers
        self.scheduler.attach(tiers)

    def step(self):
        self.now += 1
        for executor in self.executors:
            executor.tick()
        return super().step()

    def _execute(self, batch):
        self.tiers.before_forward()
        return super()._execute(batch)

    def _postprocess(self):
        outputs = super()._postprocess()
        self.tiers.after_results()
        return outputs


def tiered(
    tiers, *, timeout_s=5.0, loaders=None, saver=None, identity=IDENTITY, driver=None, **options
) -> TieredDriver:
    """A driver in the gate configuration (or a given one) with a store of these tiers."""
    driver = driver or make_driver(**options)
    driver.__class__ = TieredDriver
    memory = StubMemory(driver.runner)
    store = TierStore(tiers, memory.layout.unit_bytes, clock=lambda: driver.now)
    driver.attach(
        PageTiers(
            store,
            memory.layout,
            identity,
            memory,
            block_size=driver.scheduler.geometry.block_size,
            timeout_s=timeout_s,
            loaders=loaders or InlineExecutor(),
            saver=saver or InlineExecutor(),
            clock=lambda: driver.now,
        )
    )
    return driver
