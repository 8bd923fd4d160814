"""Packed pools and both index planes in the released precision (scenario A26: A1-A5 again)."""

from __future__ import annotations

import pytest

from tests.acceptance.prompts import random_prompt
from tests.acceptance.serving import OFF, Serving


@pytest.fixture(
    scope="module",
    params=[("fp4", "fp4"), ("bf16", "fp8")],
    ids=["fp4 pages, fp8 rings, fp4 keys", "bf16 rows, fp8 keys"],
)
def serving(request, checkpoint):
    main, index = request.param
    with Serving(checkpoint, kv_cache_dtype=main, index_cache_dtype=index) as serving:
        yield serving


def test_probe(serving):
    session = serving.session(**OFF)
    session.watch.checks = True
    import numpy as np

    prompt = random_prompt(131, 1)
    for L in [(ROWSX := 144,), (33, 40, 58), (1, 3, 5, 7, 32, 32, 31)]:
        session = serving.session(**OFF, state_checkpoint_interval_tokens=0)
        session.add(0, prompt, 8)
        for c in L:
            session.cap(c)
            session.step()
        session.cap(0)
        session.run()
        e = serving.expected(prompt, 8)
        print(
            L,
            [
                float(np.linalg.norm(session.logits[0, 131 + i] - e.logits[i]) / np.linalg.norm(e.logits[i]))
                for i in range(8)
            ],
            session.finished[0].tokens == e.tokens,
        )
    session = serving.session(**OFF)
    session.add(0, prompt, 8)
    session.run()
    session.add(1, prompt, 8)
    session.add(2, random_prompt(60, 2), 8)
    session.run()
    print(
        session.finished[1].cached_tokens,
        [
            float(np.linalg.norm(session.logits[1, 131 + i] - e.logits[i]) / np.linalg.norm(e.logits[i]))
            for i in range(8)
        ],
        session.finished[1].tokens == e.tokens,
    )
