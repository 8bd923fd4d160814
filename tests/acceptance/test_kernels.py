"""A reduced set of scenarios whose every operation is a kernel, in interpret mode (A1, A5, A10).

The runs compared share their programs, so that they agree as closely as those of XLA do.
"""

from __future__ import annotations

import pytest

from tests.acceptance.model import PAGE, write_checkpoint
from tests.acceptance.prompts import random_prompt
from tests.acceptance.serving import OFF, Serving

OPERATIONS = (
    "block_scaled_linear",
    "candidate_scores",
    "grouped_experts",
    "index_scores",
    "select_candidates",
    "select_topk",
    "sparse_attention",
)


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    path = tmp_path_factory.mktemp("kernels") / "model"
    # The kernels' least index heads and width.
    write_checkpoint(path, index_n_heads=16, index_head_dim=64)
    with Serving(path, form="stored", kernels="pallas", kv_cache_dtype="fp4") as serving:
        yield serving


def test_chunked_batched_forked_and_preempted(serving):
    session = serving.session(**OFF, long_prefill_token_threshold=PAGE)
    prompt = random_prompt(100, 4)
    session.add("long", prompt, 4)
    session.add("short", random_prompt(41, 2), 6)
    session.until(lambda: len(session.tokens("short")) >= 2)
    session.scheduler.preempt("short")
    session.run()
    session.add("fork", (*prompt[:70], *random_prompt(9, 5)), 4)
    session.run()
    assert session.finished["fork"].cached_tokens == 64
    session.assert_expected()


def test_the_summary_says_what_every_operation_uses(serving):
    chosen = serving.runner.summary()["operations"]
    assert chosen == {operation: ["triton (asked for)"] for operation in OPERATIONS}
