"""The engine on a mesh of virtual devices against the engine on one device."""

from __future__ import annotations

import pytest

from tests.mesh.conftest import SERVED


@pytest.mark.parametrize("mesh", SERVED[1:])
def test_served_tokens_are_those_of_one_device(served, mesh):
    assert served[mesh]["tokens"] == served["1"]["tokens"]
    assert served[mesh]["cached"] == served["1"]["cached"]
    assert min(served["1"]["cached"][2:]) > 0, "the last prompts reuse pages of the first"


def test_a_device_holds_its_part_of_the_weights(served):
    assert served["8"]["weights"] < served["4:experts"]["weights"] < served["1"]["weights"] / 2
    assert served["8"]["summary"]["mesh"] == "data=1,model=8"
    assert served["4:experts"]["summary"]["experts"] == "model"
