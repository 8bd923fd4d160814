"""Steps that fail: one refused before the pools are taken leaves the runner as it was, any other ends it."""

import dataclasses

import jax
import numpy as np
import pytest

from scheduler.buckets import StepShape
from scheduler.scheduled_batch import Phase
from scheduler.states import ImageStore, Relocation, StateMaintenanceOps
from tests.helpers import golden
from v41jax.full_forward import load_model
from v41jax.precision import Precision
from v41jax.runner import ModelRunner, sampling_inputs
from v41jax.step_arrays import empty_step

SHAPE = StepShape(Phase.DECODE, rows=2, requests=2, pages=2, outputs=2, query_width=1, tail=False)
MOVE = StateMaintenanceOps(relocations=(Relocation(0, 1),))


@pytest.fixture(scope="module")
def model():
    with load_model(golden.directory("pico"), Precision(np.dtype("float32"), False), max_model_len=64) as model:
        yield model


@pytest.fixture(params=["FULL", "PIECEWISE"])
def runner(model, request):
    """Its slot 0 stands elsewhere than slot 1."""
    runner = ModelRunner(model.params, model.setup, num_pages=4, num_slots=2, num_images=1, execution=request.param)
    runner.replace_pools(runner.pools.replace(cursor=runner.pools.cursor.at[0].set(7)))
    return runner


def arguments(model, runner, **changes):
    """Of a step of padding, with other arrays in its batch."""
    batch = empty_step(SHAPE, model.setup.geometry)
    rows = model.lookup.step_rows(batch)
    return batch._replace(**changes), rows, runner.step_sampling(sampling_inputs([], SHAPE.outputs))


def contents(runner):
    return [leaf.tobytes() for leaf in jax.tree.leaves(jax.tree.map(np.array, (runner.pools, runner.images)))]


def refused_arguments(model, runner):
    """With what the step is to be refused for, and maintenance that must not have happened."""
    batch, rows, sampling = arguments(model, runner)
    if runner._execution == "FULL":
        yield TypeError, arguments(model, runner, positions=np.zeros(SHAPE.rows, np.int64)), MOVE
        yield ValueError, arguments(model, runner, positions=np.zeros(SHAPE.rows + 1, np.int32)), MOVE
        yield TypeError, (batch, rows._replace(codes=tuple(codes[:1] for codes in rows.codes)), sampling), None
    foreign = ImageStore(0, 0, units=(), position=0, layout_id="another", image_bytes=1)
    yield ValueError, (batch, rows, sampling), StateMaintenanceOps(MOVE.relocations, (foreign,))


def test_a_step_that_is_refused_leaves_everything_as_it_was(model, runner):
    before = contents(runner)
    for error, given, ops in refused_arguments(model, runner):
        with pytest.raises(error):
            runner.execute(SHAPE, *given, ops)
        assert contents(runner) == before
    output = runner.execute(SHAPE, *arguments(model, runner), MOVE)
    assert not np.asarray(output.cursor_mismatch).any()
    assert np.asarray(runner.pools.cursor[:, 0]).tolist() == [7, 7]


def test_a_step_that_fails_after_its_maintenance_ends_the_runner(model, runner):
    batch, rows, sampling = arguments(model, runner)
    wrong = rows._replace(codes=tuple(codes[:1] for codes in rows.codes))
    with pytest.raises((TypeError, ValueError)):
        runner.execute(SHAPE, batch, wrong, sampling, MOVE)
    with pytest.raises(RuntimeError, match="took the pools with it"):
        runner.execute(SHAPE, batch, rows, sampling)


@pytest.mark.parametrize("runner", ["FULL"], indirect=True)
def test_a_step_that_fails_in_its_call_ends_the_runner(model, runner):
    given = arguments(model, runner)
    runner.execute(SHAPE, *given)
    program = runner._compiled[SHAPE, False]

    def failing(*arguments):
        program.call(*arguments)
        raise MemoryError("no room")

    runner._compiled[SHAPE, False] = dataclasses.replace(program, call=failing)
    with pytest.raises(MemoryError):
        runner.execute(SHAPE, *given)
    with pytest.raises(RuntimeError, match="took the pools with it"):
        runner.execute(SHAPE, *given)
