"""Decode batches of every size, and what they must not depend on or touch (scenarios A23, A29, A30)."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from scheduler.scheduled_batch import Phase
from scheduler.sequence import SamplingParams
from tests.acceptance.prompts import random_prompt
from tests.acceptance.serving import OFF
from v41jax.runner import sampling_inputs
from v41jax.step_arrays import empty_step


def test_requests_join_and_leave_at_every_step(exact):
    """A23: the batch crosses the edge between the two shapes again and again."""
    session = exact.session(**OFF)
    for name in range(12):
        session.add(name, random_prompt(5 + 3 * name, name), 1 + 5 * name % 7)
        session.steps(1 + name % 2)
    session.run()
    sizes = [batch.num_requests for batch in session.log if batch.phase is Phase.DECODE]
    shapes = {shape.requests for shape in session.watch.shapes if shape.phase is Phase.DECODE}
    assert set(sizes) >= {1, 2, 3, 4} and shapes == {2, 4}
    session.assert_expected()


def test_a_request_does_not_depend_on_its_company(exact):
    """Alone in the small shape, in a full batch, in another slot and on other pages."""
    prompt = random_prompt(61, 20)
    for company in (0, 1, 3):
        session = exact.session(**OFF)
        for name in range(company):
            session.add(name, random_prompt(19 + 30 * name, 21 + name), 12)
        session.steps(company)
        session.add("mine", prompt, 10)
        session.run()
        session.assert_expected("mine")


def test_sampled_tokens_do_not_depend_on_company_or_preemption(exact):
    """The random stream belongs to the request's seed and the token's position."""
    drawn = SamplingParams(max_tokens=10, ignore_eos=True, temperature=1.0, seed=5)
    results = []
    for disturbed in (False, True):
        session = exact.session(**OFF)
        session.add("mine", random_prompt(40, 30), drawn)
        if disturbed:
            session.add("other", random_prompt(70, 31), 12)
            session.until(lambda session=session: len(session.tokens("mine")) >= 4)
            session.scheduler.preempt("mine")
        session.run()
        results.append(session.finished["mine"].tokens)
    assert results[0] == results[1]
    assert results[0] != exact.expected(random_prompt(40, 30), 10).tokens


def test_compiling_ahead_touches_no_byte(exact):
    """A29."""
    exact.runner.reset()
    before = jax.tree.map(np.array, exact.runner.pools)
    shapes = [shape for shape in exact.buckets.shapes(False) if shape.phase is Phase.DECODE]
    exact.runner.warm_up(shapes)
    exact.runner._warm = False
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(exact.runner.pools)):
        assert old.tobytes() == np.array(new).tobytes()


@pytest.mark.parametrize("index", [0, 1])
def test_a_step_of_nothing_changes_no_byte(exact, index):
    """Invariant 21, on pools of poison."""
    exact.runner.reset()
    exact.runner.watch = None
    shape = [shape for shape in exact.buckets.shapes(False) if shape.outputs == 4][index]
    step = empty_step(shape, exact.geometry)
    before = jax.tree.map(np.array, exact.runner.pools)
    sampling = exact.runner.step_sampling(sampling_inputs([], shape.outputs))
    output = exact.runner.execute(shape, step, exact.model.lookup.step_rows(step), sampling)
    assert not np.asarray(output.cursor_mismatch).any()
    assert not np.asarray(output.logits).any()
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(exact.runner.pools)):
        assert old.tobytes() == np.array(new).tobytes()


def test_a_cursor_that_stands_elsewhere_is_an_error(exact):
    """Invariant 9: a slot that lost its state is never continued."""
    from v41jax.engine_core import EngineFailedError, StepFailedError

    session = exact.session(check=False, **OFF)
    session.add("lost", random_prompt(20, 40), 8)
    session.until(lambda: len(session.tokens("lost")) >= 2)
    pools = exact.runner.pools
    slot = session.scheduler.sequence("lost").slot
    exact.runner.replace_pools(pools.replace(cursor=pools.cursor.at[slot, 0].add(1)))
    with pytest.raises(StepFailedError, match="rebuilt from a recoverable boundary"):
        session.steps(3)
    with pytest.raises(EngineFailedError, match="rebuilt from a recoverable boundary"):
        session.step()
