"""Chunking, batching, order and padding never change what a request gets."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers import golden
from tests.helpers.batches import Driver, random_lengths
from tests.helpers.models import model
from v41jax.full_forward import full_forward

NOISE = 1e-4
"""Absolute, where logits spread by 2.0: float32 summation order."""


@pytest.fixture(scope="module")
def driver() -> Driver:
    return Driver(model("pico"))


@pytest.fixture(scope="module")
def whole(driver) -> np.ndarray:
    """Logits of prompt 4 (100 rows) in two forwards."""
    return driver.logits(prompt(4), [64])


def prompt(index: int) -> np.ndarray:
    return golden.load_expected("pico").prompt(index)


@pytest.mark.parametrize(
    "chunks",
    [[1], [3], [7, 2, 1, 5], [17], [33, 1], [1, 64]],
    ids=["one by one", "odd", "mixed", "wider than the window", "wider than two windows", "odd start"],
)
def test_any_split_gives_the_same_logits(driver, whole, chunks):
    window = driver.model.setup.config.text.sliding_window
    assert 2 * window < 33 and window < 17
    assert np.abs(driver.logits(prompt(4), chunks) - whole).max() < NOISE


@pytest.mark.parametrize("seed", range(4))
def test_any_mixture_of_requests_gives_each_its_own_logits(driver, whole, seed):
    random = np.random.default_rng(seed)
    prompts = {"a": prompt(3), "b": prompt(4), "c": prompt(2), "d": prompt(1), "e": prompt(4)[:41]}
    for key in random.permutation(list(prompts)):
        driver.add(str(key), prompts[str(key)])
    while True:
        remaining = {key: len(prompts[key]) - driver.requests[key].done for key in prompts}
        if not any(remaining.values()):
            break
        driver.run(random_lengths(remaining, 64, 4, random))
    logits = {key: driver.release(key) for key in prompts}
    assert np.abs(logits["b"] - whole).max() < NOISE
    assert np.abs(logits["e"] - whole[:41]).max() < NOISE
    for key, index in (("a", 3), ("c", 2), ("d", 1)):
        assert np.abs(logits[key] - golden.load_expected("pico").logits("noquant", index)).max() < NOISE


def test_no_scheduled_request_had_a_wrong_cursor(driver, whole):
    assert not np.any(driver.mismatches)


def test_a_wrong_cursor_is_reported(driver, whole):
    driver.add("late", prompt(3))
    driver.run({"late": 8})
    driver.requests["late"].done = 12
    driver.run({"late": 4})
    assert driver.mismatches.pop().tolist() == [True, False, False, False]
    driver.release("late")


def test_the_cursor_ends_at_the_last_row_with_its_history(driver, whole):
    driver.add("short", prompt(3))
    request = driver.requests["short"]
    driver.run({"short": 2})
    history = driver.model.setup.geometry.history_size
    cursor = np.asarray(driver.pools.cursor)[request.slot]
    assert cursor.tolist() == [2, *[-1] * (history - 2), *request.compressed[:2]]
    driver.run({"short": 9})
    cursor = np.asarray(driver.pools.cursor)[request.slot]
    assert cursor.tolist() == [11, *request.compressed[11 - history : 11]]
    driver.release("short")


def test_decode_steps_continue_a_prefill():
    loaded = model("five-layer")
    expected = golden.load_expected("five-layer")
    prefill = Driver(loaded)
    for index in (3, 4):
        prefill.add(index, expected.prompt(index))
    prefill.run({3: 10, 4: 41})
    decode = Driver(loaded, rows=2, requests=2, columns=9)
    decode.pools, decode.requests = prefill.pools, prefill.requests
    for _ in range(23):
        decode.run({4: 1, 3: 1}, phase="decode")
    for index, total in ((3, 33), (4, 64)):
        logits = np.concatenate(decode.requests[index].logits)
        assert len(logits) == total
    assert np.abs(np.concatenate(decode.requests[3].logits) - expected.logits("noquant", 3)).max() < NOISE
    # Prompt 4 has 100 rows, of which the last 64 are recorded; decode reached row 63.
    wanted = expected.logits("noquant", 4)[: 64 - 36]
    assert np.abs(np.concatenate(decode.requests[4].logits)[36:] - wanted).max() < NOISE


def test_full_forward_is_the_same_forward_in_another_bucket():
    loaded = model("five-layer")
    expected = golden.load_expected("five-layer")
    logits = full_forward(loaded.params, expected.prompt(3), loaded.setup, loaded.lookup, chunks=[5, 16])
    assert np.abs(logits - expected.logits("noquant", 3)).max() < NOISE


@pytest.mark.parametrize(("ids", "fault"), [([], "1 <= n"), ([[1]], "must be"), (np.zeros(600, int), "max_model_len")])
def test_full_forward_refuses_what_it_cannot_run(ids, fault):
    loaded = model("five-layer")
    with pytest.raises(ValueError, match=fault):
        full_forward(loaded.params, ids, loaded.setup, loaded.lookup)
