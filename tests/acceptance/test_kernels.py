"""A reduced set of scenarios whose every operation is a kernel, in interpret mode (A1, A5, A10).

The kernels compute in bfloat16 on quantized values, where another order of a sum shows. A kernel adds up what it reads
from a ring apart from what its own forward computed, so the runs compared take the same chunks, and then equal to the
bit: neither company nor page, slot, hit or preemption shows in a row.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.acceptance.model import PAGE, write_checkpoint
from tests.acceptance.prompts import random_prompt
from tests.acceptance.serving import OFF, Expected, Serving

OPERATIONS = (
    "block_scaled_linear",
    "candidate_scores",
    "grouped_experts",
    "grouped_linear",
    "index_scores",
    "quantized_rows",
    "route",
    "select_candidates",
    "select_topk",
    "sparse_attention",
    "stream_mixes",
    "window_key_write",
)


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    path = tmp_path_factory.mktemp("kernels") / "model"
    # The kernels' least index heads and widths, and few layers, because each takes seconds to compile: an encoder layer
    # that owns pages at ratio 2, the decoder's owner with the candidates, and one that selects again among them.
    layers = {"compress_ratios": [2, 1, 1], "kv_source_layer_ids": [0, 1], "index_source_layer_ids": [0, 1, 2]}
    layers |= {"num_hidden_layers": 3, "candidate_source_layer_id": 1, "engram_layer_ids": [0]}
    write_checkpoint(path, index_n_heads=16, index_head_dim=64, moe_intermediate_size=64, **layers)
    with Serving(path, form="stored", kernels="pallas", rows=2 * PAGE, kv_cache_dtype="fp4") as serving:
        yield serving


def test_chunked_batched_forked_and_preempted(serving):
    chunks = {"long_prefill_token_threshold": PAGE}
    session = serving.session(**OFF, **chunks)
    prompt, other = random_prompt(70, 4), random_prompt(41, 2)
    session.add("long", prompt, 3)
    session.add("preempted early", other, 3)
    session.until(lambda: session.computed("preempted early") == PAGE)
    session.scheduler.preempt("preempted early")
    session.add("preempted late", random_prompt(38, 3), 4)
    session.until(lambda: len(session.tokens("preempted late")) >= 2)
    session.scheduler.preempt("preempted late")
    session.run()
    session.add("fork", (*prompt[:67], *random_prompt(6, 5)), 3)
    session.run()
    assert session.finished["fork"].cached_tokens == 64 and session.scheduler.counters.preemptions == 2
    session.assert_expected("long", "preempted early", "fork", **chunks)
    # What was generated before a preemption is part of a prompt afterwards.
    tokens = session.finished["preempted late"].tokens
    whole = serving.expected(random_prompt(38, 3), 2, **chunks)
    resumed = serving.expected((*random_prompt(38, 3), *tokens[:2]), 2, **chunks)
    expected = Expected(whole.tokens + resumed.tokens, np.concatenate([whole.logits, resumed.logits]))
    session.assert_equals("preempted late", expected)
    assert session.watch.worst == 0


def test_the_summary_says_what_every_operation_uses(serving):
    chosen = serving.runner.summary()["operations"]
    assert chosen == {operation: ["triton (asked for)"] for operation in OPERATIONS}
