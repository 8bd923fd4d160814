"""Makes a model of random weights write a given text: a constraint that allows one token at a time."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from v41jax.engine import Engine
from v41jax.logit_edits import GeneratedTokens


class Forced:
    """Allows exactly the given tokens, in order, and anything after them."""

    def __init__(self, tokens: Sequence[int]):
        self.tokens = tuple(tokens)

    def write_mask(self, generated: GeneratedTokens, words: NDArray[np.uint32]) -> bool:
        """See `TokenConstraint`."""
        if generated.count >= len(self.tokens):
            return False
        token = self.tokens[generated.count]
        words[:] = 0
        words[token // 32] = np.uint32(1) << np.uint32(token % 32)
        return True


@contextlib.contextmanager
def replies(engine: Engine, *texts: str | Sequence[int]) -> Iterator[None]:
    """The next streams of an engine generate these texts (or ids) and end."""
    waiting = []
    for text in texts:
        ids = engine.tokenizer.encode_with_control(text) if isinstance(text, str) else text
        waiting.append([*ids, engine.tokenizer.control_id("<｜end▁of▁sentence｜>")])
    original = engine.stream

    def stream(prompt):
        return original(dataclasses.replace(prompt, constraint=Forced(waiting.pop(0))))

    engine.stream = stream
    try:
        yield
    finally:
        del engine.stream
    assert not waiting, f"{len(waiting)} replies were not asked for"
