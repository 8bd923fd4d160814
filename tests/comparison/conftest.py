"""A tiny checkpoint whose clamps are reached, a prompt, and the sides that tests compare, opened once."""

from __future__ import annotations

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import golden
from v41jax.comparison.options import parse
from v41jax.comparison.subjects import open_subject
from v41jax.precision import Precision

TOKENS = 60
UNTIL = 3
"""Layers that the planted faults lie in: a window layer, an Engram layer, and an owner of compressed entries."""


@pytest.fixture(scope="package")
def clamped(tmp_path_factory):
    """The golden `pico` with a clamp that a few of a hundred hidden values reach."""
    path = tmp_path_factory.mktemp("comparison") / "clamped"
    shutil.copytree(golden.directory("pico"), path, ignore=shutil.ignore_patterns("expected.npz"))
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["swiglu_limit"] = 1.5
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="package")
def prompt():
    return np.random.default_rng(5).integers(3, 500, TOKENS).astype(np.int32)


@pytest.fixture(scope="package")
def sides(clamped):
    """Text of a side -> it, opened once."""
    opened = {}

    def get(text: str, directory=clamped):
        if (text, directory) not in opened:
            options = parse(text, Precision(jnp.float32, activation_quantization=False))
            opened[text, directory] = open_subject(directory, options, 128, 8)
        return opened[text, directory]

    yield get
    for subject in opened.values():
        subject.close()
