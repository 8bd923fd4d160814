"""One file: every stored dtype, every fault of a header, and mutated headers that give faults and nothing else."""

import itertools
import json
import random
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from checkpoints.errors import CheckpointError, shown
from checkpoints.safetensors_file import HEADER_LIMIT, MappedFile, header_length, parse_header, read_header
from tests.checkpoints.files import entry, header_bytes

SOUND = {
    "__metadata__": {"format": "pt"},
    "a.weight": entry("F8_E4M3", [2, 3], 0, 6),
    "a.scale": entry("F8_E8M0", [1, 2], 6, 8),
    "b": entry("BF16", [2], 8, 12),
    "c": entry("F32", [], 12, 16),
    "d": entry("I8", [4], 16, 20),
    "empty": entry("F32", [0, 5], 20, 20),
}


def parse(entries, data_size=20):
    raw = header_bytes(entries)
    size = len(raw) + data_size
    length = header_length(raw[:8], size, "x.safetensors")
    return parse_header(raw[8 : 8 + length], size, "x.safetensors")


def faults(entries, data_size=20):
    with pytest.raises(CheckpointError) as caught:
        parse(entries, data_size)
    return list(caught.value.faults)


def changed(**updates):
    return {**SOUND, **updates}


def test_every_stored_dtype_is_mapped(tmp_path):
    values = {
        "a.weight": np.float32([1, -2, 448, 0, 2.0**-9, 3]).astype(ml_dtypes.float8_e4m3fn).reshape(2, 3),
        "a.scale": np.uint8([[0, 254]]),
        "b": np.float32([1.5, -3]).astype(ml_dtypes.bfloat16),
        "c": np.float32(7.25),
        "d": np.uint8([0x10, 0x32, 0x80, 0xFF]),
    }
    path = tmp_path / "x.safetensors"
    path.write_bytes(header_bytes(SOUND) + b"".join(value.tobytes() for value in values.values()))
    entries, metadata = read_header(path)
    assert metadata == {"format": "pt"} and list(entries) == list(SOUND)[1:]
    file = MappedFile(path)
    for name, value in values.items():
        array = file.array(entries[name])
        assert array.dtype == value.dtype and array.shape == value.shape and not array.flags.writeable
        np.testing.assert_array_equal(array.astype(np.float32), value.astype(np.float32))
    assert file.array(entries["empty"]).shape == (0, 5)
    kept = file.array(entries["d"])
    file.give_back_pages()
    file.close()
    assert kept.tolist() == [0x10, 0x32, 0x80, 0xFF]
    with pytest.raises(CheckpointError, match="closed"):
        file.array(entries["d"])


@pytest.mark.parametrize(
    "entries, message",
    [
        (b"{", "header: not JSON"),
        (b"\xff\xfe", "header: not UTF-8 at byte 0"),
        (b"[1]", "header is a JSON list"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": %s}' % (b"9" * 5000), "header: not JSON"),
        (b'{"a": 1, "a": 2}', "key a appears twice"),
        (b'{"a": {"dtype": "F32", "dtype": "F32"}}', "key dtype appears twice"),
        (changed(b=7), "b: entry 7 must have exactly dtype, shape and data_offsets"),
        (changed(b={"dtype": "BF16", "shape": [2]}), "must have exactly"),
        (changed(b=entry("BF17", [2], 8, 12)), "b: unknown dtype BF17"),
        (changed(b=entry(["BF16"], [2], 8, 12)), "unknown dtype ['BF16']"),
        (changed(b=entry("BF16", 2, 8, 12)), "shape 2 must be at most 8 whole numbers"),
        (changed(b=entry("BF16", [-2, -1], 8, 12)), "shape [-2, -1] must be"),
        (changed(b=entry("BF16", [2.0], 8, 12)), "shape [2.0] must be"),
        (changed(b=entry("BF16", [True, 2], 8, 12)), "shape [True, 2] must be"),
        (changed(b=entry("BF16", [1] * 8 + [2], 8, 12)), "must be at most 8"),
        (changed(b=entry("BF16", [2**62, 2**62, 2**62], 8, 12)), "needs "),
        (changed(b=entry("BF16", [2], 8, None)), "data_offsets [8, None] must be two"),
        (changed(b=entry("BF16", [2], 12, 8)), "data_offsets [12, 8] run backwards"),
        (changed(b=entry("BF16", [3], 8, 12)), "b: BF16 [3] needs 6 bytes, data_offsets give 4"),
        (changed(b=entry("F32", [2], 8, 12)), "b: F32 [2] needs 8 bytes, data_offsets give 4"),
        (changed(b=entry("BF16", [7], 8, 22)), "bytes 8 to 22 lie outside the file's 20 bytes of data (truncated?)"),
        (changed(b=entry("BF16", [2], 4, 8)), "b: overlaps a.weight by 2 bytes"),
        ({key: value for key, value in SOUND.items() if key != "b"}, "c: 4 bytes before it belong to no tensor"),
        ({key: value for key, value in SOUND.items() if key not in ("d", "empty")}, "4 bytes at the end belong to no"),
        (changed(__metadata__=3), "__metadata__ must map strings to strings"),
        (changed(__metadata__={"a": 1}), "__metadata__ must map strings to strings"),
    ],
)
def test_each_header_fault_is_one_line_with_file_and_tensor(entries, message):
    found = faults(entries)
    assert any(message in fault for fault in found), found
    assert all(fault.startswith("x.safetensors: ") and "\n" not in fault and len(fault) < 600 for fault in found)


def test_all_faults_of_a_header_are_listed():
    found = faults(changed(b=entry("F17", [2], 8, 12), c=entry("F32", [9], 12, 16), d=3))
    assert [fault.split(": ")[1] for fault in found] == ["b", "c", "d"]


def test_truncation_names_the_tensors_that_are_cut():
    found = faults(SOUND, data_size=15)
    assert {fault.split(": ")[1] for fault in found} == {"c", "d", "empty"}


def test_a_name_with_control_characters_stays_on_one_line():
    found = faults({"a\n\x1b[31m\ud800" + "x" * 500: 3})
    assert len(found) == 1 and found[0].isascii() and found[0].isprintable() and "a\\n" in found[0]
    assert shown(10**5000) == "a huge int"


def test_a_header_that_claims_gigabytes_allocates_nothing(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes((90 * 2**30).to_bytes(8, "little") + b"{}")
    sparse = tmp_path / "sparse.safetensors"
    with open(sparse, "wb") as stream:
        stream.write((90 * 2**30).to_bytes(8, "little"))
        stream.truncate(100 * 2**30)
    tracemalloc.start()
    with pytest.raises(
        CheckpointError, match=r"x.safetensors: its header claims 96636764160 bytes, but the file has 10"
    ):
        read_header(path)
    with pytest.raises(CheckpointError, match=f"the limit is {HEADER_LIMIT}"):
        read_header(sparse)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_a_tensor_that_claims_gigabytes_is_refused_before_it_is_mapped():
    found = faults(changed(d=entry("I8", [2**40], 16, 16 + 2**40)))
    assert found == [
        f"x.safetensors: d: bytes 16 to {16 + 2**40} lie outside the file's 20 bytes of data (truncated?)",
    ]


@pytest.mark.parametrize("content", [b"", b"1234567"])
def test_a_file_too_short_for_a_header(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="too few for a safetensors file"):
        read_header(path)
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_header(tmp_path / "absent.safetensors")


class Mutations:
    """Damages a sound header in the ways files and programs do: in its bytes, its JSON values and its structure."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def __call__(self):
        raw = bytearray(header_bytes(SOUND))
        size = len(raw) + 20
        how = self.random.randrange(4)
        if how == 0:
            raw = self.bytes(raw)
        elif how == 1:
            raw = bytearray(header_bytes(self.structure(json.loads(raw[8:]))))
            size = len(raw) + self.random.choice([20, 20, 0, 19, 21, 40])
        elif how == 2:
            raw = self.text(raw)
            size = len(raw) + 20
        else:
            raw[:8] = self.random.choice([0, 1, len(raw) - 9, len(raw), 2**31, 2**63, 2**64 - 1]).to_bytes(8, "little")
        return bytes(raw), self.random.choice([size, size, size, 0, 7, 8, 9, size - 1, size + 1, 2**40])

    def bytes(self, raw):
        for _ in range(self.random.randint(1, 6)):
            raw[self.random.randrange(len(raw))] = self.random.randrange(256)
        return raw

    def text(self, raw):
        text = raw[8:].decode()
        for _ in range(self.random.randint(1, 3)):
            cut = self.random.randrange(len(text))
            end = min(len(text), cut + self.random.randint(0, 12))
            piece = self.random.choice(
                ["", "0", "-", "9" * 30, "1e400", "null", '"', "}", "[[", '"a.weight":', text[cut:end] * 2]
            )
            text = text[:cut] + piece + text[end:]
        return bytearray(header_bytes(text.encode()))

    def structure(self, header):
        for _ in range(self.random.randint(1, 3)):
            names = list(header)
            name = self.random.choice(names)
            target = header[name]
            junk = self.random.choice(
                [
                    None,
                    True,
                    -1,
                    0,
                    1,
                    3,
                    2**62,
                    2**80,
                    1.5,
                    "",
                    "BF16",
                    "F8_E8M0",
                    "\x00\n",
                    [],
                    [0],
                    [0, 1],
                    {},
                    [[0]],
                ]
            )
            action = self.random.randrange(5)
            if action == 0:
                header.pop(name)
            elif action == 1:
                header[name] = junk
            elif action == 2:
                header[self.random.choice(["", "b", "new\n", "é", "__metadata__"])] = target
            elif isinstance(target, dict) and target:
                key = self.random.choice(list(target))
                if action == 3 and isinstance(target[key], list) and target[key]:
                    target[key][self.random.randrange(len(target[key]))] = junk
                else:
                    target[key] = junk
            if not header:
                break
        return header


def test_twenty_thousand_mutated_headers_give_checkpoint_errors_and_nothing_else():
    mutate = Mutations(2024)
    refused = 0
    for _ in range(20_000):
        raw, size = mutate()
        try:
            length = header_length(raw[:8], size, "x.safetensors")
            entries, _ = parse_header(raw[8 : 8 + length], size, "x.safetensors")
        except CheckpointError as error:
            refused += 1
            assert error.faults
            for fault in error.faults:
                assert fault.startswith("x.safetensors: ") and fault.isprintable() and len(fault) < 1000
        else:
            spans = sorted((found.begin, found.end) for found in entries.values())
            assert all(left[1] == right[0] for left, right in itertools.pairwise(spans))
            assert not spans or spans[-1][1] == size
    assert 15_000 < refused < 20_000
