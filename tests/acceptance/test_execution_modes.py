"""The three execution modes give the same tokens."""

from __future__ import annotations

import dataclasses

import pytest

from scheduler.sequence import SamplingParams
from tests.helpers.golden import load_expected
from tests.test_engine import CHECKPOINT, CONFIG
from v41jax.engine import Engine
from v41jax.engine_requests import Prompt

WHOLE = dataclasses.replace(CONFIG, max_model_len=128, num_pages=8)
"""Shapes that the engine's own tests compile too."""
PIECES = dataclasses.replace(WHOLE, execution_mode="PIECEWISE", compile_level=0)
EAGER = dataclasses.replace(WHOLE, enforce_eager=True)


def tokens_of(config):
    """Eight tokens after eight, which is one window: the decoder's tail is the whole prompt."""
    prompt = tuple(load_expected("five-layer").prompt(2)[:8].tolist())
    with Engine.from_checkpoint(CHECKPOINT, config, warm_up=False) as engine:
        tokens = engine.generate([Prompt(prompt, SamplingParams(max_tokens=8, ignore_eos=True))])[0].tokens
        return tokens, engine.summary()


@pytest.fixture(scope="module")
def whole():
    tokens, summary = tokens_of(WHOLE)
    assert (summary["execution"], summary["programs"]) == ("FULL", 2)
    return tokens


@pytest.mark.parametrize(
    "config",
    [PIECES, dataclasses.replace(PIECES, decoder_swa_bounded_replay=True), EAGER],
    ids=["pieces", "pieces with a tail", "eager"],
)
def test_pieces_and_eager_steps_give_the_tokens_of_whole_steps(whole, config):
    tokens, summary = tokens_of(config)
    assert tokens == whole
    assert len(tokens) == 8
    assert summary["programs"] == 0
    assert summary["execution"] == ("EAGER" if config.enforce_eager else "PIECEWISE")
