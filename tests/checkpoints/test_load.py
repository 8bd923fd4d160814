"""Strict opening: what agrees opens, what does not is named file by file and tensor by tensor, all of it at once."""

import json
import os
import random
import shutil

import ml_dtypes
import numpy as np
import pytest

from checkpoints import load
from checkpoints.errors import CheckpointError
from checkpoints.index_file import INDEX_NAME, parse_index
from checkpoints.load import Checkpoint
from checkpoints.save import write_checkpoint
from checkpoints.schema import SCOPES, scope_of, tensor_schema
from checkpoints.verify import verify
from tests.checkpoints.files import edit_header, edit_json
from tests.helpers.golden import GOLDEN

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
PLAIN = "layers.0.attn.q_norm.weight"
SCALE = "layers.0.attn.wq_a.scale"
EXPERT = "layers.0.ffn.experts.3.w1.weight"


@pytest.fixture
def directory(tmp_path):
    return shutil.copytree(GOLDEN / "pico", tmp_path / "pico")


def faults(directory, scopes=SCOPES):
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory, scopes)
    assert all(fault.isprintable() for fault in caught.value.faults)
    return list(caught.value.faults)


def test_tensors_appear_as_stored():
    with Checkpoint.open(GOLDEN / "pico", SCOPES) as checkpoint:
        assert checkpoint.names == tuple(tensor_schema(checkpoint.config))
        dtypes = {
            "embed.weight": ml_dtypes.bfloat16,
            "layers.0.hc_attn_fn": np.float32,
            "layers.0.attn.wq_a.weight": ml_dtypes.float8_e4m3fn,
            SCALE: np.uint8,
            EXPERT: np.uint8,
        }
        for name, dtype in dtypes.items():
            tensor = checkpoint.tensor(name)
            assert tensor.dtype == dtype and tensor.shape == checkpoint.schema[name].shape
            assert not tensor.flags.writeable
        raw = (GOLDEN / "pico" / FIRST).read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        assert checkpoint.tensor("embed.weight").tobytes() == raw[start : start + 512 * 128 * 2]
        embed = checkpoint.tensor("embed.weight")
    assert np.isfinite(embed.astype(np.float32)).all()
    with pytest.raises(CheckpointError, match="closed"):
        checkpoint.tensor("embed.weight")


@pytest.mark.parametrize("scope", SCOPES)
def test_a_scope_opens_alone(scope, tmp_path):
    with Checkpoint.open(GOLDEN / "pico", (scope,)) as golden:
        assert {scope_of(name) for name in golden.names} == {scope}
        with pytest.raises(KeyError, match="not in the opened scopes"):
            golden.tensor("embed.weight" if scope != "text" else "mtp.0.main_norm.weight")
        write_checkpoint(tmp_path, golden.config, golden.schema, lambda name, spec: [golden.tensor(name)])
        names = golden.names
    with Checkpoint.open(tmp_path, (scope,)) as alone:
        assert alone.names == names
    missing = faults(tmp_path)
    assert len(missing) == 1175 - len(names)
    assert all(fault.startswith(f"{INDEX_NAME}: ") and fault.endswith(": missing") for fault in missing)
    with pytest.raises(ValueError, match="unknown scope 'audio'"):
        Checkpoint.open(tmp_path, ("audio",))


def test_pages_of_earlier_tensors_are_given_back(monkeypatch):
    given_back = []
    monkeypatch.setattr(load, "RESIDENT_LIMIT", 200_000)
    monkeypatch.setattr(load.MappedFile, "give_back_pages", lambda self: given_back.append(self.path.name))
    with Checkpoint.open(GOLDEN / "pico") as checkpoint:
        total = sum(checkpoint.tensor(name).nbytes for name in checkpoint.names)
    assert set(given_back) == {FIRST, SECOND}
    assert total / 200_000 < len(given_back) / 2 < 2 * total / 200_000


def test_views_survive_giving_back_pages(monkeypatch):
    monkeypatch.setattr(load, "RESIDENT_LIMIT", 1)
    with Checkpoint.open(GOLDEN / "pico") as checkpoint:
        views = {name: checkpoint.tensor(name) for name in checkpoint.names}
        assert all(np.array_equal(view, checkpoint.tensor(name)) for name, view in views.items())


def move(header, name, **changes):
    header[name].update(changes)


BROKEN = {
    "wrong dtype": (
        lambda d: edit_header(d / FIRST, lambda h: move(h, PLAIN, dtype="F16")),
        f"{FIRST}: {PLAIN}: dtype F16, expected BF16 (plain)",
    ),
    "experts as fp8": (
        lambda d: edit_header(d / FIRST, lambda h: move(h, EXPERT, dtype="F8_E4M3")),
        f"{FIRST}: {EXPERT}: dtype F8_E4M3, expected I8 (expert weight)",
    ),
    "wrong shape": (
        lambda d: edit_header(d / FIRST, lambda h: move(h, "embed.weight", shape=[128, 512])),
        f"{FIRST}: embed.weight: shape [128, 512], expected [512, 128]",
    ),
    "wrong block": (
        lambda d: edit_header(d / FIRST, lambda h: move(h, SCALE, shape=[8, 1])),
        f"{FIRST}: {SCALE}: shape [8, 1], expected [2, 4] (one scale for 32 x 32 elements)",
    ),
    "truncated file": (
        lambda d: os.truncate(d / SECOND, (d / SECOND).stat().st_size - 1),
        f"{SECOND}: image_newline: bytes 2761336 to 2761592 lie outside the file's 2761591 bytes of data",
    ),
    "trailing bytes": (
        lambda d: (d / SECOND).open("ab").write(b"xyz"),
        f"{SECOND}: 3 bytes at the end belong to no tensor",
    ),
    "missing file": (lambda d: (d / SECOND).unlink(), f"{SECOND}: cannot be read: No such file or directory"),
    "huge header": (
        lambda d: (d / FIRST).write_bytes((2**40).to_bytes(8, "little") + (d / FIRST).read_bytes()[8:]),
        f"{FIRST}: its header claims 1099511627776 bytes",
    ),
    "missing from the index": (
        lambda d: edit_json(d / INDEX_NAME, lambda i: i["weight_map"].pop(PLAIN)),
        f"{INDEX_NAME}: {PLAIN}: missing",
    ),
    "extra in the index": (
        lambda d: edit_json(d / INDEX_NAME, lambda i: i["weight_map"].update({"lm_head.weight": FIRST})),
        f"{INDEX_NAME}: lm_head.weight: not a tensor of this configuration",
    ),
    "missing from the shard": (
        lambda d: edit_header(d / FIRST, lambda h: h.update({"stray": h.pop(PLAIN)})),
        f"{FIRST}: {PLAIN}: missing, although {INDEX_NAME} places it there",
    ),
    "extra in the shard": (
        lambda d: edit_header(d / FIRST, lambda h: h.update({"stray": h.pop(PLAIN)})),
        f"{FIRST}: stray: not in {INDEX_NAME}",
    ),
    "in two shards": (
        lambda d: edit_header(
            d / SECOND,
            lambda h: h.update({"embed.weight": {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}}),
        ),
        f"{SECOND}: embed.weight: {INDEX_NAME} places it in {FIRST}",
    ),
    "twice in a header": (
        lambda d: edit_header(
            d / FIRST, lambda h: json.dumps(h).replace('"norm.weight":', '"head.weight":', 1).encode()
        ),
        f"{FIRST}: header: key head.weight appears twice",
    ),
    "twice in the index": (
        lambda d: (d / INDEX_NAME).write_text(
            (d / INDEX_NAME).read_text().replace('"norm.weight":', '"head.weight":', 1)
        ),
        f"{INDEX_NAME}: key head.weight appears twice",
    ),
    "overlap": (
        lambda d: edit_header(
            d / FIRST,
            lambda h: h["head.weight"].update(data_offsets=[offset - 2 for offset in h["head.weight"]["data_offsets"]]),
        ),
        f"{FIRST}: head.weight: overlaps embed.weight by 2 bytes",
    ),
    "total size": (
        lambda d: edit_json(d / INDEX_NAME, lambda i: i["metadata"].update(total_size=5)),
        f"{INDEX_NAME}: metadata.total_size is 5, the tensors have 5808976 bytes",
    ),
    "index leaves the directory": (
        lambda d: edit_json(d / INDEX_NAME, lambda i: i["weight_map"].update({PLAIN: "../x.safetensors"})),
        f"{INDEX_NAME}: {PLAIN}: shard ../x.safetensors is not the name of a file beside it",
    ),
    "no index": (lambda d: (d / INDEX_NAME).unlink(), f"{INDEX_NAME}: cannot be read: No such file"),
    "no config": (lambda d: (d / "config.json").unlink(), "config.json: cannot be read: No such file"),
    "config of another model": (
        lambda d: edit_json(d / "config.json", lambda c: c.update(model_type="deepseek_v4")),
        "config.json: model_type is 'deepseek_v4'",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_each_fault_names_file_and_tensor(case, directory):
    damage, message = BROKEN[case]
    damage(directory)
    found = faults(directory)
    assert any(fault.startswith(message) for fault in found), found
    assert set(found) <= set(verify(directory).faults)


def test_all_faults_are_listed_together(directory):
    cases = [
        "wrong shape",
        "experts as fp8",
        "wrong block",
        "extra in the shard",
        "truncated file",
        "extra in the index",
    ]
    for case in cases:
        BROKEN[case][0](directory)
    found = faults(directory)
    for case in cases:
        assert any(fault.startswith(BROKEN[case][1]) for fault in found), (case, found)


def test_a_file_that_changes_while_open_is_an_error(directory):
    with Checkpoint.open(directory) as checkpoint:
        os.truncate(directory / FIRST, 1000)
        with pytest.raises(CheckpointError, match=f"{FIRST}: changed on disk while it was open"):
            checkpoint.tensor("embed.weight")


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {"a": 3}}', b'{"weight_map":{},"metadata":[]}']
)
def test_damaged_index_shapes(data):
    with pytest.raises(CheckpointError, match=INDEX_NAME):
        parse_index(data)


def test_damaged_directories_give_checkpoint_errors_and_nothing_else(directory):
    chance = random.Random(5)
    files = [FIRST, SECOND, INDEX_NAME, "config.json"]
    originals = {name: (directory / name).read_bytes() for name in files}
    for _ in range(80):
        name = chance.choice(files)
        raw = bytearray(originals[name])
        for _ in range(chance.randint(1, 4)):
            raw[chance.randrange(min(len(raw), 20_000))] = chance.choice(b'0123456789{}[]",:\x00\xff -')
        (directory / name).write_bytes(raw[: chance.choice([len(raw), len(raw), chance.randrange(len(raw))])])
        try:
            with Checkpoint.open(directory, SCOPES) as checkpoint:
                checkpoint.tensor("embed.weight")
        except CheckpointError as error:
            assert all(fault.isprintable() for fault in error.faults)
        (directory / name).write_bytes(originals[name])
