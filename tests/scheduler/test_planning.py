"""The chunk plan: every consequence the runtime specification lists under "Chunk planning", as properties."""

import itertools
import random

import pytest

from scheduler.batch import Preparation
from scheduler.planning import ChunkPlan, ChunkRules, plan_chunk, replay_fields, replay_start

RANDOM_HISTORIES = 100_000


def check_plan(plan, resume, goal, budget, rebuild, rules):
    """Everything that holds for any plan that is not a wait."""
    assert plan.start <= resume < plan.end <= goal
    assert plan.end - plan.start <= budget
    assert plan.is_final == (plan.end == goal)
    assert plan.start == resume or plan.start % rules.hash_block == 0
    if rules.cap:
        assert plan.end <= resume + rules.cap
    if rebuild:
        assert plan.start == resume - rules.hash_block
    if plan.is_final:
        assert plan.end - plan.start >= min(rules.min_final_rows, plan.end)


def test_random_histories_progress_and_keep_every_promise():
    rng = random.Random(20)
    waits = replays = 0
    for _ in range(RANDOM_HISTORIES):
        block = rng.choice((32, 64, 96, 128))
        window = rng.randint(1, block + 1)
        encoder, decoder = rng.random() < 0.7, rng.random() < 0.7
        most = rng.randint(2 * block, 6 * block)
        rules = ChunkRules(
            hash_block=block,
            cap=rng.choice((0, 0, block, 2 * rng.randint(block // 2, 2 * block))),
            min_final_rows=window if decoder else 0,
        )
        goal = rng.randint(1, 12 * block)
        hit = block * rng.randint(0, (goal - 1) // block)
        resume, rebuild = hit, encoder and hit > 0
        lowest = hit - block if rebuild else 0
        while resume < goal:
            empty = rng.random() < 0.6
            budget = most if empty else rng.randint(1, most)
            plan = plan_chunk(resume, goal, budget, empty, rebuild, rules)
            if plan is None:
                assert not empty, f"a lone request waits: {rules}, {resume} of {goal}, budget {budget}"
                waits += 1
                continue
            check_plan(plan, resume, goal, budget, rebuild, rules)
            assert not rebuild or plan.start >= 0
            assert not encoder or plan.start >= lowest, "a back-off went below the encoder rebuild"
            replays += plan.start < resume
            resume, rebuild = plan.end, False
    assert waits > 1000
    assert replays > 10_000


@pytest.mark.parametrize("window", [32, 33])
def test_every_resume_below_400_can_finish(window):
    block = 32
    count = 0
    for cap, budget in itertools.product((0, 32, 34), (64, 65, 127, 128, 200)):
        rules = ChunkRules(hash_block=block, cap=cap, min_final_rows=window)
        for resume in range(400):
            for goal in range(resume + 1, resume + 72, 1 if resume < 100 else 7):
                for rebuild in (False, True) if resume and resume % block == 0 else (False,):
                    plan = plan_chunk(resume, goal, budget, True, rebuild, rules)
                    assert plan is not None
                    check_plan(plan, resume, goal, budget, rebuild, rules)
                    count += 1
    assert count > 150_000


def test_back_off_aims_one_whole_block_below_the_resume_point():
    rules = ChunkRules(hash_block=128, min_final_rows=128)
    # From 200 the nearest boundary above 200 - 128 is 128; it would leave 73 rows of the 128 the decoder needs.
    assert replay_start(200, 201, True, False, rules) == 0
    assert replay_start(256, 257, True, False, rules) == 128
    assert replay_start(300, 427, True, False, rules) == 128
    assert replay_start(300, 428, True, False, rules) == 300
    assert replay_start(300, 301, False, False, rules) == 300


def test_a_short_prompt_needs_no_more_rows_than_it_has():
    rules = ChunkRules(hash_block=128, min_final_rows=128)
    assert plan_chunk(0, 2, 256, True, False, rules) == ChunkPlan(0, 2, True)
    assert plan_chunk(1, 2, 256, True, False, rules) == ChunkPlan(0, 2, True)


def test_the_cap_counts_from_the_resume_point():
    rules = ChunkRules(hash_block=128, cap=128, min_final_rows=128)
    # A rebuild of 128 rows must not eat the cap.
    assert plan_chunk(256, 1000, 512, True, True, rules) == ChunkPlan(128, 384, False)
    assert plan_chunk(300, 400, 512, True, False, rules) == ChunkPlan(128, 400, True)


def test_a_chunk_that_would_only_recompute_waits():
    rules = ChunkRules(hash_block=128, min_final_rows=128)
    assert plan_chunk(300, 301, 160, False, False, rules) is None
    # 256 rows carry this one past its resume point but not to the goal: it is scheduled, not final.
    assert plan_chunk(370, 450, 300, False, False, rules) == ChunkPlan(128, 384, False)


def test_a_budget_below_two_blocks_can_wait_forever():
    rules = ChunkRules(hash_block=128, min_final_rows=128)
    assert plan_chunk(300, 301, 128, True, False, rules) is None


def test_budget_cuts_land_on_the_grid_unless_the_step_is_empty():
    rules = ChunkRules(hash_block=32)
    assert rules.align == 64
    assert plan_chunk(0, 500, 130, True, False, rules) == ChunkPlan(0, 128, False)
    assert plan_chunk(0, 500, 63, False, False, rules) is None
    assert plan_chunk(0, 500, 63, True, False, rules) == ChunkPlan(0, 63, False)


def test_a_wanted_image_cuts_the_chunk_and_delays_the_back_off():
    rules = ChunkRules(hash_block=32, min_final_rows=32)
    assert plan_chunk(64, 100, 128, True, False, rules, cut=96) == ChunkPlan(64, 96, False)
    assert plan_chunk(96, 100, 128, True, False, rules) == ChunkPlan(64, 100, True)
    assert plan_chunk(64, 100, 128, True, False, rules, cut=64) == ChunkPlan(64, 100, True)


def test_without_chunked_prefill_a_prompt_is_whole_or_waits():
    rules = ChunkRules(hash_block=32, cap=32, chunked=False)
    assert plan_chunk(0, 100, 128, True, False, rules, cut=64) == ChunkPlan(0, 100, True)
    assert plan_chunk(0, 100, 90, False, False, rules) is None
    # A preempted request that outgrew the budget is split after all: nothing else could finish it.
    assert plan_chunk(0, 200, 128, True, False, rules) == ChunkPlan(0, 128, False)


def test_replay_fields_of_the_four_kinds_of_forward():
    assert replay_fields(0, 0, False) == (Preparation.RESET, 0, 0, 0, 0)
    assert replay_fields(96, 96, False) == (Preparation.CONTINUE, 0, 0, 0, 0)
    assert replay_fields(64, 96, True) == (Preparation.RESET, 96, 0, 0, 64)
    assert replay_fields(64, 101, False) == (Preparation.REWIND, 101, 101, 101, 64)
    # A back-off to position 0 keeps the warm slot: it holds rows that later positions still see.
    assert replay_fields(0, 33, False) == (Preparation.REWIND, 33, 33, 33, 0)
