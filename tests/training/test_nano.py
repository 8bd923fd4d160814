"""The trained miniature in the repository is whole, and the serving stack makes language of it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

import checkpoints
from benchmarks.nano_numerics import nats_of
from checkpoints.verify import verify
from training.data import BEGIN
from v41jax.full_forward import full_forward, load_model

NANO = Path(checkpoints.__file__).parent / "nano"

# Pride and Prejudice, chapter 58, which was held out of training.
TEXT = """They walked towards the Lucases, because Kitty wished to call upon
Maria; and as Elizabeth saw no occasion for making it a general concern,"""

MOST_BITS_A_BYTE = 1.9
"""Of `TEXT`; guessing evenly among the 2,048 tokens costs more than 4."""


def bits_a_byte(ids: np.ndarray) -> float:
    with load_model(NANO, max_model_len=64) as model:
        logits = full_forward(model.params, ids[:-1], model.setup, model.lookup)
    return float(nats_of(logits, ids[1:]).sum()) / math.log(2) / len(TEXT.encode())


@pytest.fixture(scope="module")
def ids() -> np.ndarray:
    tokenizer = Tokenizer.from_file(str(NANO / "tokenizer.json"))
    return np.array([BEGIN, *tokenizer.encode(TEXT, add_special_tokens=False).ids], np.int32)


def test_the_miniature_is_a_whole_checkpoint_of_at_most_16_megabytes():
    assert verify(NANO).faults == ()
    assert sum(file.stat().st_size for file in NANO.iterdir()) <= 16e6


def test_held_out_text_costs_few_bits_and_more_in_another_order(ids):
    ours = bits_a_byte(ids)
    assert ours < MOST_BITS_A_BYTE
    assert bits_a_byte(np.array([BEGIN, *ids[:0:-1]], np.int32)) > 2 * ours
