"""Prompts of the scenarios."""

from __future__ import annotations

import numpy as np

from tests.acceptance.model import VOCABULARY

SPECIAL = 3
LAST = VOCABULARY - 10
"""Ids from here on stand for images and noise."""

ENGLISH = "The pages of a request are shared by reference, and a page that was filled never changes again. " * 2
CHINESE = "请求的每一页都按引用共享，写满之后不再改变；滑动窗口只保存最近的若干个位置。" * 2
CODE = "for page in table[:length]:\n    if hashes[page] == NO_HASH and owners[page] != owner:\n        spoil(page)\n"


def random_prompt(length: int, seed: int) -> tuple[int, ...]:
    """Ids that are neither special nor image ids."""
    return tuple(np.random.default_rng(seed).integers(SPECIAL, LAST, length).tolist())


def text_prompt(text: str) -> tuple[int, ...]:
    """One id a byte."""
    return tuple(SPECIAL + byte % (LAST - SPECIAL) for byte in text.encode())
