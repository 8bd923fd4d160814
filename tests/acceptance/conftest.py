"""Runners shared by all acceptance scenarios of a process: compiling is what they cost."""

from __future__ import annotations

import jax
import pytest

from checkpoints.load import Checkpoint
from tests.acceptance.model import DRAFT, write_checkpoint
from tests.acceptance.oracle import OracleExaminer
from tests.acceptance.serving import EXACT, Serving
from v41jax.reference import ReferenceModel
from v41jax.reference.replay_oracle import ReplayOracle


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("acceptance") / "model"
    write_checkpoint(path)
    return path


@pytest.fixture(scope="session")
def draft_checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("acceptance") / "drafting"
    write_checkpoint(path, **DRAFT)
    return path


@pytest.fixture(autouse=True)
def optimized_steps(request):
    """Optimizes machine code again where `exact` serves: its few programs run for thousands of steps."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", before and "exact" not in request.fixturenames)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="session")
def exact(checkpoint):
    """Float32 without activation quantization; two decode shapes."""
    with Serving(checkpoint, decode=(2, 4), **EXACT) as serving:
        yield serving


@pytest.fixture(scope="session")
def reference(checkpoint):
    """The float64 model of the same weights."""
    with (
        Checkpoint.open(checkpoint, scopes=("text",)) as opened,
        ReferenceModel(opened, activation_quantization=False) as model,
    ):
        yield model


@pytest.fixture
def oracle_examiner(reference, exact):
    """Makes examiners that compare a session with the dense oracle."""
    return lambda: OracleExaminer(ReplayOracle(reference), exact.geometry)
