"""Engram tables: mapped, gathered by row, closed once, and never read after the file changed."""

import os
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from checkpoints.engram_tables import EngramTables
from checkpoints.errors import CheckpointError
from checkpoints.load import Checkpoint

GOLDEN = Path(__file__).parents[1] / "golden" / "pico"


@pytest.fixture
def checkpoint(tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(GOLDEN, directory)
    with Checkpoint.open(directory) as opened:
        yield opened


def test_rows_are_the_stored_codes_in_the_order_asked_for(checkpoint):
    ids = np.array([3423, 0, 17, 0, 3423, 5], np.int64)
    with EngramTables.open(checkpoint) as tables:
        codes, scales = tables.gather(1, ids)
    weight = checkpoint.tensor("layers.4.engram.embed.weight")
    assert weight.dtype == ml_dtypes.float8_e4m3fn
    assert (codes.dtype, codes.shape, scales.dtype, scales.shape) == (np.uint8, (6, 32), np.uint8, (6, 1))
    np.testing.assert_array_equal(codes, weight.view(np.uint8)[ids])
    np.testing.assert_array_equal(scales, checkpoint.tensor("layers.4.engram.embed.scale")[ids])


def test_gather_of_nothing(checkpoint):
    with EngramTables.open(checkpoint) as tables:
        codes, scales = tables.gather(0, np.zeros(0, np.int64))
    assert codes.shape == (0, 32) and scales.shape == (0, 1)


@pytest.mark.parametrize("bad", [-1, 3144])
def test_a_row_outside_the_table_is_refused(checkpoint, bad):
    with EngramTables.open(checkpoint) as tables, pytest.raises(IndexError, match=f"row {bad} lies outside the 3144"):
        tables.gather(0, np.array([0, bad, 3]))


def test_tables_outlive_the_checkpoint_object_and_close_once(checkpoint):
    tables = EngramTables.open(checkpoint)
    checkpoint.close()
    codes, _ = tables.gather(0, np.array([1]))
    tables.close()
    tables.close()
    with pytest.raises(CheckpointError, match="closed"):
        tables.gather(0, np.array([1]))
    assert codes.shape == (1, 32)


@pytest.mark.parametrize("change", ["truncate", "replace", "remove", "touch"])
def test_files_changing_under_the_tables_are_an_error_and_not_a_crash(checkpoint, change):
    with EngramTables.open(checkpoint) as tables:
        path, _ = checkpoint.location("layers.1.engram.embed.weight")
        if change == "truncate":
            os.truncate(path, 100)
        elif change == "replace":
            copy = path.with_suffix(".new")
            shutil.copy(path, copy)
            os.replace(copy, path)
        elif change == "remove":
            path.unlink()
        else:
            os.utime(path, ns=(1, 1))
        with pytest.raises(CheckpointError, match=f"{path.name}: changed on disk while it was open"):
            tables.gather(0, np.array([1]))
        with pytest.raises(CheckpointError, match="changed on disk"):
            EngramTables.open(checkpoint)
