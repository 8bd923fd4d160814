"""Host lookup of Engram rows from the golden checkpoint's tables."""

from __future__ import annotations

import os
import shutil

import ml_dtypes
import numpy as np
import pytest

from checkpoints.engram_tables import EngramTables
from checkpoints.errors import CheckpointError
from checkpoints.load import Checkpoint
from scheduler.batch import DEAD
from tests.helpers import golden
from v41jax.engram_lookup import EngramLookup
from v41jax.quantization_numpy import dequantize_rows
from v41jax.token_map import load_token_map

HISTORY = [DEAD, DEAD, DEAD]


def lookup_of(checkpoint: Checkpoint, tables: EngramTables) -> EngramLookup:
    token_map = load_token_map(checkpoint.directory, checkpoint.config)
    return EngramLookup(checkpoint.config, token_map, tables)


@pytest.fixture(scope="module")
def checkpoint():
    with Checkpoint.open(golden.directory("pico")) as opened:
        yield opened


@pytest.fixture(scope="module")
def lookup(checkpoint):
    with EngramTables.open(checkpoint) as tables:
        yield lookup_of(checkpoint, tables)


def test_rows_are_the_table_rows_of_the_recorded_hashes(checkpoint, lookup):
    expected = golden.load_expected("pico")
    compressed = lookup.hasher.compress(expected.recorded("noquant", "rec_prompt"))
    rows = lookup.rows(compressed, [HISTORY], [0, 48])
    for ordinal, layer in enumerate(checkpoint.config.text.engram_layer_ids):
        ids = expected.recorded("noquant", "engram_hash")[:, ordinal]
        table = checkpoint.tensor(f"layers.{layer}.engram.embed.weight").view(np.uint8)
        scales = checkpoint.tensor(f"layers.{layer}.engram.embed.scale")
        assert np.array_equal(rows.codes[ordinal], table[ids])
        assert np.array_equal(rows.scales[ordinal], scales[ids])
        assert rows.codes[ordinal].shape == (48, 6, 32) and rows.scales[ordinal].shape == (48, 6, 1)


def test_a_batch_with_histories_dead_rows_and_padding(lookup):
    ids = np.arange(3, 15, dtype=np.int32)
    whole = lookup.rows(ids, [HISTORY], [0, 12])
    flat = np.concatenate([ids[8:12], ids[:4], [DEAD], [7, 7]])
    rows = lookup.rows(flat, [ids[5:8], HISTORY], [0, 4, 9])
    for layer in range(2):
        assert np.array_equal(rows.codes[layer][:4], whole.codes[layer][8:12])
        assert np.array_equal(rows.codes[layer][4:8], whole.codes[layer][:4])
        assert np.array_equal(rows.scales[layer][:4], whole.scales[layer][8:12])
        # The dead row and the two padding rows, whatever ids the padding holds.
        assert not rows.codes[layer][8:].any()
        assert (rows.scales[layer][8:] == 127).all()


def test_rows_decode_element_by_element(lookup):
    rows = lookup.rows(np.arange(3, 9), [HISTORY], [0, 6])
    values = dequantize_rows(rows.codes[0], rows.scales[0])
    for token, column, element in np.ndindex(6, 6, 32):
        code = rows.codes[0][token, column, element].view(ml_dtypes.float8_e4m3fn)
        assert values[token, column, element] == float(code) * 2.0 ** (int(rows.scales[0][token, column, 0]) - 127)


def test_padding_decodes_to_zero(lookup):
    rows = lookup.rows([DEAD, DEAD], [HISTORY], [0, 1])
    assert not dequantize_rows(rows.codes[0], rows.scales[0]).any()


def test_a_batch_without_requests_reads_nothing(lookup):
    rows = lookup.rows([5, 6], np.zeros((0, 3), np.int32), [0])
    assert not rows.codes[0].any()


def test_tables_are_usable_until_closed_and_not_after(checkpoint):
    tables = EngramTables.open(checkpoint)
    lookup = lookup_of(checkpoint, tables)
    lookup.rows([4], [HISTORY], [0, 1])
    tables.close()
    tables.close()
    with pytest.raises(CheckpointError, match="closed"):
        lookup.rows([4], [HISTORY], [0, 1])


def test_files_that_change_under_an_open_table_are_an_error(tmp_path):
    copy = tmp_path / "pico"
    shutil.copytree(golden.directory("pico"), copy)
    with Checkpoint.open(copy) as checkpoint, EngramTables.open(checkpoint) as tables:
        lookup = lookup_of(checkpoint, tables)
        lookup.rows([4], [HISTORY], [0, 1])
        path, _ = checkpoint.location("layers.1.engram.embed.weight")
        os.utime(path, ns=(1, 1))
        with pytest.raises(CheckpointError, match=path.name):
            lookup.rows([4], [HISTORY], [0, 1])
