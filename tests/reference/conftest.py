"""Golden checkpoints, opened once for the tests of the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from checkpoints.load import Checkpoint
from tests.helpers import golden
from v41jax.reference import ReferenceModel


@pytest.fixture(scope="package")
def open_checkpoint():
    """Name of a golden checkpoint -> it, open for text and vision."""
    opened: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in opened:
            opened[name] = Checkpoint.open(golden.directory(name), scopes=("text", "vision"))
        return opened[name]

    yield get
    for checkpoint in opened.values():
        checkpoint.close()


@pytest.fixture
def make_model(open_checkpoint) -> Callable[..., ReferenceModel]:
    """(name, **options) -> a reference model of a golden checkpoint, closed after the test."""
    models: list[ReferenceModel] = []

    def make(name: str, **options: object) -> ReferenceModel:
        models.append(ReferenceModel(open_checkpoint(name), **options))
        return models[-1]

    yield make
    for model in models:
        model.close()
