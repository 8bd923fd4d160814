"""Recordings written and read back, and files that are none."""

import numpy as np
import pytest

from tests.helpers import golden
from v41jax.comparison.recording import Recording, read, write


def test_what_is_written_is_read(tmp_path):
    random = np.random.default_rng(0)
    streams = random.normal(size=(4, 2, 3)).astype(np.float32)
    mix = random.random((4, 2)).astype(np.float32)
    topk = np.array([[0, -1]] * 4, np.int32)
    layers = [
        {"streams": streams, "pre_mix": mix, "engram_row_ids": np.arange(8).reshape(4, 2)},
        {"streams": 2 * streams, "pre_mix": mix, "topk": topk, "index_scores": np.zeros((4, 4), np.float32)},
        {"streams": 3 * streams, "pre_mix": mix, "topk": topk},
    ]
    made = Recording(np.arange(4, dtype=np.int32), layers, streams, mix, np.ones((4, 9)))
    path = tmp_path / "run.npz"
    write(path, made, "noquant.float32")
    found = read(path, None, 3, (0,))
    assert np.array_equal(found.ids, made.ids) and np.array_equal(found.logits, made.logits)
    for wrote, got in zip(layers, found.layers):
        assert set(wrote) == set(got)
        assert all(np.array_equal(wrote[name], got[name]) for name in wrote)
    with np.load(path) as file:
        assert "noquant.float32.topk1" in file.files and "noquant.float32.engram_hash" in file.files


def test_golden_recordings_are_read():
    path = golden.directory("pico") / "expected.npz"
    found = read(path, "quant.float32", 12, (1, 4))
    assert len(found.ids) == 48 and found.logits is None
    assert found.layers[6]["topk"].shape[0] == 48 and "topk" not in found.layers[7]
    assert set(found.layers[4]) == {"streams", "pre_mix", "topk", "engram_row_ids"}
    with pytest.raises(ValueError, match=r"noquant.float32, quant.float32; none is named, use npz:FILE@NAME"):
        read(path, None, 12, (1, 4))
    with pytest.raises(ValueError, match="streams of 12 layers, the model has 5"):
        read(path, "quant.float32", 5, (1,))
