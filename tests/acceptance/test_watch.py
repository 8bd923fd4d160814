"""The watch, the oracle and the comparisons notice what they are there for: each corruption fails its session."""

from __future__ import annotations

import dataclasses

import pytest

from scheduler.batch_builder import build_batch_step
from scheduler.scheduled_batch import Phase
from tests.acceptance.model import BOUNDARY, PAGE
from tests.acceptance.prompts import random_prompt
from tests.acceptance.serving import OFF
from v41jax import engine_core
from v41jax.engine_core import StepFailedError


def page_of(session, name, index):
    return session.scheduler.sequence(name).block_table[index]


def corrupt_page(session, pools):
    """A row of another request's page."""
    plane = pools.main[1]
    return pools.replace(main=(pools.main[0], plane.at[page_of(session, "other", 0), 3, 5].add(1e-6)))


def corrupt_index(session, pools):
    plane = pools.index_values[0]
    return pools.replace(index_values=(plane.at[page_of(session, "mine", 0), 2, 0].add(1e-6), pools.index_values[1]))


def corrupt_ring(session, pools):
    """A ring row that the step does not write."""
    slot, end = session.scheduler.sequence("mine").slot, int(session.log[-1].ends[-1])
    return pools.replace(window=pools.window.at[2, slot, end % PAGE, 0].add(1e-6))


def corrupt_free_slot(session, pools):
    return pools.replace(tail_kv=pools.tail_kv.at[0, 3].set(1.0))


def corrupt_cursor(session, pools):
    slot = session.scheduler.sequence("mine").slot
    return pools.replace(cursor=pools.cursor.at[slot, 0].add(1))


def corrupt_history(session, pools):
    slot = session.scheduler.sequence("mine").slot
    return pools.replace(cursor=pools.cursor.at[slot, 2].add(1))


def corrupt_free_page(session, pools):
    free = next(iter(session.scheduler.manager.pool.vacant_pages()))
    return pools.replace(main=(pools.main[0].at[free].set(0.0), pools.main[1]))


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (corrupt_page, r"main\[1\] changed"),
        (corrupt_index, r"index_values\[0\] changed"),
        (corrupt_ring, "window changed"),
        (corrupt_free_slot, "tail_kv changed"),
        (corrupt_cursor, "invariant 7"),
        (corrupt_history, "invariant 8"),
        (corrupt_free_page, r"main\[0\] changed"),
    ],
)
def test_a_step_that_writes_where_it_should_not(exact, monkeypatch, corrupt, message):
    session = exact.session(**OFF)
    session.add("other", random_prompt(70, 1), 12)
    session.add("mine", random_prompt(40, 2), 12)
    session.until(lambda: len(session.tokens("mine")) >= 3)
    around = session.watch.around

    def corrupted(shape, arrays, execute):
        def run():
            output = execute()
            runner = session.serving.runner
            runner.replace_pools(corrupt(session, runner.pools))
            return output

        return around(shape, arrays, run)

    monkeypatch.setattr(session.watch, "around", corrupted)
    with pytest.raises(StepFailedError, match=message) as caught:
        session.steps(2)
    assert isinstance(caught.value.__cause__, AssertionError)


@pytest.mark.parametrize("what", ["ring", "page", "tail"])
def test_state_that_is_slightly_wrong_changes_logits_beyond_the_tolerance(exact, what):
    """One value of one row, off by a hundredth."""
    session = exact.session(check=False, **OFF)
    session.add(0, random_prompt(70, 3), 8)
    session.until(lambda: session.computed(0) >= 70)  # the row after it is dispatched; half a pair is in the tail
    runner, slot = exact.runner, session.scheduler.sequence(0).slot
    pools = runner.pools
    if what == "ring":
        pools = pools.replace(window=pools.window.at[BOUNDARY, slot, 5].mul(1.01))
    elif what == "page":
        row = pools.main[1][page_of(session, 0, 2), 3] * 1.01
        pools = pools.replace(main=(pools.main[0], pools.main[1].at[page_of(session, 0, 2), 3].set(row)))
    else:
        pools = pools.replace(tail_kv=pools.tail_kv.at[:, slot].mul(1.01))
    runner.replace_pools(pools)
    session.run()
    with pytest.raises(AssertionError, match="logits of token"):
        session.assert_expected()


@pytest.mark.parametrize("field", ["swa_replay_start", "cached_until", "swa_cached_until", "write_from"])
def test_a_back_off_with_a_wrong_number(exact, oracle_examiner, monkeypatch, field):
    """The watch or the oracle notices each of the numbers."""
    session = exact.session(
        encoder_swa_bounded_replay=False,
        decoder_swa_bounded_replay=True,
        state_checkpoint_interval_tokens=0,
        long_prefill_token_threshold=PAGE,
    )
    session.watch.examiners.append(oracle_examiner())

    def build(batch, *arguments, **options):
        if batch.phase is Phase.PREFILL and (batch.starts < batch.resumes).any():
            wrong = batch.resumes if field == "swa_replay_start" else batch.starts
            batch = dataclasses.replace(batch, **{field: wrong})
        return build_batch_step(batch, *arguments, **options)

    monkeypatch.setattr(engine_core, "build_batch_step", build)
    session.add(0, random_prompt(3 * PAGE + 5, 4), 3)
    with pytest.raises(StepFailedError) as caught:
        session.run()
    assert isinstance(caught.value.__cause__, AssertionError)
