"""A draft call of the runner: the pools it takes and hands back, what it is sent, and what a loop of it copies."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from pallas_kernels import backend
from scheduler.model_view import ModelView
from scheduler.pools import abstract as abstract_pools
from scheduler.runtime_config import EngineConfig
from tests.dspark import driver
from tests.dspark.driver import Driver, greedy
from v41jax.draft_runner import DraftingWeights, DraftRunner, serve_draft
from v41jax.held_weights import abstract_held
from v41jax.layers.collectives import Parallel
from v41jax.model import ModelSetup
from v41jax.precision import Precision
from v41jax.presets import preset
from v41jax.runner import sampling_inputs
from v41jax.speculative_steps import draft_step

SLOTS, PAGES = 4, 4 * driver.PAGES


@pytest.fixture
def runner():
    """With prompts in slots 1 and 3."""
    model, draft = driver.load()
    run = Driver(model, draft)
    for slot, length in ((1, 40), (3, 7)):
        run.prefill(slot, np.random.default_rng(slot).integers(3, 500, length).tolist())
    runner = DraftRunner(model.params, model.setup, draft, num_pages=PAGES, num_slots=SLOTS)
    runner.replace_pools(run.pools)
    return runner


def test_a_draft_call_hands_the_pools_back_where_they_lie(runner):
    before = runner.pools
    contents = jax.tree.map(np.array, before)
    places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(before)]
    expected = jax.jit(draft_step, static_argnames=("setup", "confidence"))(
        *runner.weights, before, np.int32([1, 3]), np.array([True, True]), greedy(2), setup=runner.setup
    )
    block = runner.draft(2, [1, 3], greedy(2))
    assert np.array_equal(block.tokens, expected.tokens) and np.unique(block.tokens).size > 1
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before)), "the next step would wait for a reader"
    after = jax.tree.leaves(runner.pools)
    assert [leaf.unsafe_buffer_pointer() for leaf in after] == places
    assert all(np.array_equal(old, new, equal_nan=True) for old, new in zip(jax.tree.leaves(contents), after))
    assert np.array_equal(runner.draft(2, [1, 3], greedy(2)).tokens, block.tokens)


def test_places_and_padding_of_the_batch(runner):
    alone = runner.draft(2, [1, 3], greedy(2)).tokens
    spread = runner.draft(4, [1, 3], greedy(4), [3, 1]).tokens
    assert np.array_equal(spread[np.array([3, 1])], alone) and not np.any(spread[np.array([0, 2])])


def test_what_the_host_makes_for_a_draft_call_is_one_array(runner):
    lowered, prepare, _ = runner._lower(3)
    small = (np.zeros(3, np.int32), np.zeros(3, bool), sampling_inputs([], 3))
    assert len(jax.tree.leaves(small)) == 8
    assert [leaf.dtype for leaf in jax.tree.leaves(prepare(*small))] == [np.int32]
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(runner.pools))


def test_a_draft_call_that_fails_takes_the_pools_with_it(runner):
    runner.draft(2, [1, 3], greedy(2))
    program = runner._compiled[2]

    def failing(*arguments):
        program.call(*arguments)
        raise MemoryError("no room")

    runner._compiled[2] = dataclasses.replace(program, call=failing)
    with pytest.raises(MemoryError):
        runner.draft(2, [1, 3], greedy(2))
    with pytest.raises(RuntimeError, match="took the pools with it"):
        runner.draft(1, [1], greedy(1))


def test_a_draft_call_that_is_refused_leaves_the_pools(runner):
    block = runner.draft(2, [1, 3], greedy(2))
    with pytest.raises(ValueError, match="not those of the shapes"):
        runner.draft(2, [1, 3], greedy(3))
    with pytest.raises(IndexError):
        runner.draft(2, [1, 3], greedy(2), [1, 2])
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(runner.pools))
    assert np.array_equal(runner.draft(2, [1, 3], greedy(2)).tokens, block.tokens)


def test_draft_programs_are_compiled_with_the_others_and_late_ones_counted(runner):
    runner.warm_up((), drafts=(1, 2))
    assert runner.recompiles == 0 and len(runner.programs) == 2
    runner.draft(2, [1], greedy(2))
    assert runner.recompiles == 0 and len(runner.programs) == 2
    runner.draft(3, [1], greedy(3))
    assert runner.recompiles == 1 and len(runner.programs) == 3


def test_op_by_op_it_drafts_the_same(runner):
    compiled = runner.draft(1, [3], greedy(1)).tokens
    eager = DraftRunner(
        runner.params, runner.setup, runner.draft_parameters, num_pages=PAGES, num_slots=SLOTS, execution="EAGER"
    )
    eager.replace_pools(runner.pools)
    assert np.array_equal(eager.draft(1, [3], greedy(1)).tokens, compiled)


def largest_slice(jaxpr, inside=False):
    """Bytes of the largest array that a loop, outside of kernels, takes a part of, or is given part by part."""
    sizes = [0]
    for equation in jaxpr.eqns:
        loops = inside or equation.primitive.name in ("scan", "while")
        if equation.primitive.name == "scan":
            body = getattr(equation.params["jaxpr"], "jaxpr", equation.params["jaxpr"])
            pairs = zip(equation.invars, body.invars, strict=True)
            sizes += [size_of(part.aval) for given, part in pairs if given.aval.shape != part.aval.shape]
        if inside and equation.primitive.name in ("dynamic_slice", "slice", "gather"):
            sizes.append(size_of(equation.outvars[0].aval))
        if equation.primitive.name != "pallas_call":
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
                if is_jaxpr(inner):
                    sizes.append(largest_slice(getattr(inner, "jaxpr", inner), loops))
    return max(sizes)


def is_jaxpr(value):
    return isinstance(value, (core.Jaxpr, core.ClosedJaxpr))


def size_of(aval):
    return math.prod(aval.shape) * aval.dtype.itemsize


def test_stages_of_the_released_draft_are_read_in_their_stack():
    """The experts of a stage are 2.4 GB: a loop that is given one stage after the other copies them on a GPU. No
    loop takes as much as a megabyte out of an array."""
    config = preset("v4.1-flash")
    options = EngineConfig(num_pages=1, max_num_seqs=1, speculative_method="dspark", num_speculative_tokens=5)
    geometry = options.geometry(ModelView.from_config(config))
    held = abstract_held(options, config, Parallel(), 1024, sees=False)
    setup = ModelSetup(config, geometry, Precision(), "auto")
    draft = functools.partial(serve_draft, setup=setup, confidence=False)
    # Without their places: JAX 0.11 takes those of arguments for part of their types.
    weights = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), DraftingWeights(held.target, held.draft)
    )
    small = (jnp.zeros(1, jnp.int32), jnp.ones(1, bool), sampling_inputs([], 1))
    with backend.use_target(backend.Target("triton", "cuda")):
        traced = jax.make_jaxpr(draft)(weights, abstract_pools(geometry, 1, 1), *small)
    assert largest_slice(traced.jaxpr) < 2**20
