"""Calibration profiles: what one holds, and that it is refused wherever it was not measured."""

import dataclasses
import json

import numpy as np
import pytest

from tests.helpers import golden
from v41jax.confidence import Blocks, reliability
from v41jax.confidence_profile import Profile, ProfileError, evidence_of, running_identity
from v41jax.config import ModelConfig
from v41jax.full_forward import geometry_of
from v41jax.model import ModelSetup
from v41jax.precision import Precision

DIRECTORY = golden.directory("five-layer")


def setup_of(packed=False, **precision):
    config = ModelConfig.from_file(DIRECTORY)
    choice = Precision(**precision)
    return ModelSetup(config, geometry_of(config, choice, speculative_tokens=5, packed=packed), choice, "xla")


def identity(**changes):
    options = {"device": "cpu", "mesh": {"data": 1, "model": 4}} | changes
    return running_identity(DIRECTORY, options.pop("setup", setup_of()), **options)


def profile(**changes):
    fields = {
        "identity": identity(),
        "draft_width": 5,
        "max_num_seqs": 2,
        "sps_table": [100, 100, 100, 98, 95, 90, 84, 78, 72, 66, 60, 55, 50],
        "sts_temperatures": [1.0, 1.1, 0.9, 1.0, 1.5],
        "evidence": {},
    }
    return Profile(**fields | changes)


def test_a_profile_comes_back_from_its_file(tmp_path):
    blocks = Blocks(np.full((4, 2), 0.5), [2, 2, 1, 0], [1, 2, 0, 0], [0, 0, 1, 1])
    report = reliability(blocks, [1.0, 1.0])
    written = profile(evidence=evidence_of(blocks, {1: 10.0, 6: 8.0}, report, report))
    path = tmp_path / "profile.json"
    written.write(path)
    assert Profile.read(path) == written
    written.check(identity(), draft_width=5, max_num_seqs=2)
    written.check(identity(), draft_width=5, max_num_seqs=1)
    evidence = json.loads(path.read_text())["evidence"]
    assert evidence["blocks"] == 4 and evidence["measured_rows"] == [1, 6]
    assert evidence["held_out_after"]["brier"] == pytest.approx((0.25 + (0.25**2 + 0.75**2) / 2) / 2)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"device": "NVIDIA H200"}, "device"),
        ({"mesh": {"data": 2, "model": 2}}, "mesh"),
        ({"mesh": None}, "mesh"),
        ({"weights": "dequantized"}, "weights"),
        ({"eager": True}, "execution"),
        ({"setup": setup_of(packed=True)}, "layout"),
        ({"setup": setup_of(activation_dtype="float32")}, "precision"),
        ({"setup": dataclasses.replace(setup_of(), kernels="pallas")}, "kernels"),
    ],
)
def test_another_process_refuses_it(changes, field):
    with pytest.raises(ProfileError, match=f"measured with {field} ") as caught:
        profile().check(identity(**changes), draft_width=5, max_num_seqs=2)
    assert len(caught.value.faults) == 2


@pytest.mark.parametrize("field", ["config_sha256", "index_sha256", "model_type", "versions"])
def test_another_checkpoint_or_version_refuses_it(field):
    with pytest.raises(ProfileError, match=f"measured with {field} "):
        profile().check(dataclasses.replace(identity(), **{field: "other"}), draft_width=5, max_num_seqs=2)


def test_every_difference_is_named_at_once():
    with pytest.raises(ProfileError) as caught:
        profile().check(identity(device="TPU v5p", mesh=None), draft_width=4, max_num_seqs=3)
    assert len(caught.value.faults) == 5
    assert "the profile covers 2 requests, max_num_seqs is 3" in caught.value.faults


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sps_table": [10.0] * 12}, "sps_table has 12 entries, 13 cover 0..12 rows"),
        ({"sps_table": [10.0] * 12 + [11.0]}, "sps_table rises at 12 rows"),
        ({"sps_table": [10.0] * 12 + [0.0]}, "sps_table must be a list of finite positive numbers"),
        ({"sps_table": "fast"}, "sps_table must be a list"),
        ({"sts_temperatures": [1.0] * 4}, "4 temperatures for a draft of width 5"),
        ({"sts_temperatures": [1.0, 1.0, float("nan"), 1.0, 1.0]}, "sts_temperatures must be a list of finite"),
        ({"sts_temperatures": [1.0, 1.0, -1.0, 1.0, True]}, "sts_temperatures must be a list of finite"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0, must be a positive integer"),
        ({"evidence": []}, "evidence is list, must be an object"),
    ],
)
def test_broken_profiles_are_refused(changes, message):
    with pytest.raises(ProfileError, match=message.replace(".", r"\.")):
        profile(**changes)


def broken_files():
    root = {"version": 2, **dataclasses.asdict(profile())}
    yield "[1]", "no calibration profile of version 2"
    yield "{", "not a JSON file"
    yield json.dumps(root | {"version": 1}), "found 1"
    yield json.dumps({key: value for key, value in root.items() if key != "sps_table"}), "lacks sps_table"
    yield json.dumps(root | {"speed": 1}), "unknown field 'speed'"
    yield json.dumps(root | {"identity": {"device": "cpu"}}), "identity must have exactly the fields"


@pytest.mark.parametrize(("text", "message"), list(broken_files()))
def test_files_that_hold_no_profile_are_refused(tmp_path, text, message):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=message):
        Profile.read(path)
