"""Reader of one safetensors file: header checks, memory map, and the dtypes public loaders refuse (F8_E8M0).

A file is `u64 header length, JSON header, tensor bytes`; offsets count from the end of the header, and the ranges must
cover the tensor bytes without overlap or hole. What a tensor should be called or look like is up to `schema.py`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from checkpoints.errors import CheckpointError, shown

HEADER_LIMIT = 100_000_000
"""Longest header accepted, bytes; the format's public reader has the same limit."""
RANK_LIMIT = 8

ITEM_SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
"""Bytes per element of every dtype a header may name."""

ARRAY_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(np.uint8),
    "I8": np.dtype(np.uint8),
}
"""How the stored dtypes of the released layout appear as arrays: scales and packed FP4 stay codes."""


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """One tensor of a header; `begin` and `end` are byte offsets in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class _DuplicateKey(ValueError):
    pass


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKey(f"key {shown(key)} appears twice")
            seen.add(key)
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def parse_json(data: bytes) -> Any:
    """Strict JSON: UTF-8, no duplicate key, no NaN or Infinity.

    Raises:
      ValueError: with a one-line reason, for anything else.
    """
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique_pairs, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos}") from None
    except _DuplicateKey:
        raise
    except ValueError as error:
        raise ValueError(f"not JSON: {shown(str(error))}") from None


def header_length(prefix: bytes, file_size: int, file: str) -> int:
    """Checks the first eight bytes of a file against its size and returns the header's length in bytes.

    Raises:
      CheckpointError: for a length the file cannot hold, before anything of that length is read.
    """
    if file_size < 8 or len(prefix) < 8:
        raise CheckpointError([f"{file}: {file_size} bytes are too few for a safetensors file"])
    length = int.from_bytes(prefix[:8], "little")
    if length > file_size - 8:
        raise CheckpointError([f"{file}: its header claims {length} bytes, but the file has {file_size}"])
    if length > HEADER_LIMIT:
        raise CheckpointError([f"{file}: its header claims {length} bytes; the limit is {HEADER_LIMIT}"])
    return length


def parse_header(header: bytes, file_size: int, file: str) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Parses and checks a whole header.

    Args:
      header: the JSON bytes, after the length prefix.
      file_size: size of the whole file, bytes.
      file: name for messages.

    Returns:
      the tensors by name, in header order, and `__metadata__`.

    Raises:
      CheckpointError: one line for every fault: JSON, dtype, shape, offsets, overlap, holes, size.
    """
    try:
        root = parse_json(header)
    except ValueError as error:
        raise CheckpointError([f"{file}: header: {error}"]) from None
    if not isinstance(root, dict):
        raise CheckpointError([f"{file}: header is a JSON {type(root).__name__}, expected an object"])
    faults: list[str] = []
    metadata = root.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        faults.append(f"{file}: __metadata__ must map strings to strings")
        metadata = {}
    data_begin = 8 + len(header)
    data_size = file_size - data_begin
    entries: dict[str, TensorEntry] = {}
    for name, description in root.items():
        try:
            entries[name] = _entry(description, data_begin, data_size)
        except ValueError as error:
            faults.append(f"{file}: {shown(name)}: {error}")
    if not faults:
        faults.extend(f"{file}: {fault}" for fault in _range_faults(entries, data_begin, data_size))
    if faults:
        raise CheckpointError(faults)
    return entries, metadata


def _natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _entry(description: Any, data_begin: int, data_size: int) -> TensorEntry:
    if not isinstance(description, dict) or set(description) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"entry {shown(description)} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = description["dtype"], description["shape"], description["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        raise ValueError(f"unknown dtype {shown(dtype)}")
    if not isinstance(shape, list) or len(shape) > RANK_LIMIT or not all(map(_natural, shape)):
        raise ValueError(f"shape {shown(shape)} must be at most {RANK_LIMIT} whole numbers from 0")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_natural, offsets)):
        raise ValueError(f"data_offsets {shown(offsets)} must be two whole numbers from 0")
    begin, end = offsets
    if begin > end:
        raise ValueError(f"data_offsets {shown(offsets)} run backwards")
    if end > data_size:
        raise ValueError(f"bytes {begin} to {end} lie outside the file's {data_size} bytes of data (truncated?)")
    needed = math.prod(shape) * ITEM_SIZES[dtype]
    if needed != end - begin:
        raise ValueError(f"{dtype} {shown(shape)} needs {shown(needed)} bytes, data_offsets give {end - begin}")
    return TensorEntry(dtype, tuple(shape), data_begin + begin, data_begin + end)


def _range_faults(entries: dict[str, TensorEntry], data_begin: int, data_size: int) -> Iterator[str]:
    previous, reached = "the header", data_begin
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin < reached:
            yield f"{shown(name)}: overlaps {shown(previous)} by {reached - entry.begin} bytes"
        elif entry.begin > reached:
            yield f"{shown(name)}: {entry.begin - reached} bytes before it belong to no tensor"
        if entry.end > reached:
            previous, reached = name, entry.end
    if reached < data_begin + data_size:
        yield f"{data_begin + data_size - reached} bytes at the end belong to no tensor"


class MappedFile:
    """A read-only memory map of one file that notices when the file is replaced, truncated or rewritten.

    Arrays taken from it keep the mapping alive after `close`, so that no reader ever touches unmapped memory.
    """

    def __init__(self, path: Path, *, random_access: bool = False):
        self.path = path
        try:
            with open(path, "rb") as stream:
                self._identity = _identity(os.fstat(stream.fileno()))
                self._map: mmap.mmap | None = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError([f"{path.name}: cannot be mapped: {error}"]) from None
        if random_access and hasattr(mmap, "MADV_RANDOM"):
            self._map.madvise(mmap.MADV_RANDOM)

    def array(self, entry: TensorEntry) -> NDArray[Any]:
        """The tensor as a read-only array, without a copy.

        Raises:
          CheckpointError: closed, or the file changed since it was opened.
        """
        self.check_unchanged()
        assert self._map is not None
        count = math.prod(entry.shape)
        if count == 0:
            return np.zeros(entry.shape, ARRAY_DTYPES[entry.dtype])
        return np.frombuffer(self._map, ARRAY_DTYPES[entry.dtype], count, entry.begin).reshape(entry.shape)

    def check_unchanged(self) -> None:
        """Raises CheckpointError when the file is not what was opened; reading on could crash the process."""
        if self._map is None:
            raise CheckpointError([f"{self.path.name}: is closed"])
        try:
            same = _identity(os.stat(self.path)) == self._identity
        except OSError:
            same = False
        if not same:
            raise CheckpointError([f"{self.path.name}: changed on disk while it was open; open the checkpoint again"])

    def give_back_pages(self) -> None:
        """Lets the kernel take back every resident page; arrays stay valid and are read again on use.

        The whole file, because a page fault also maps the neighbours of the page that was read.
        """
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Drops this object's hold on the mapping; it ends with the last array taken from it."""
        self._map = None


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def read_header(path: Path) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Reads and checks the header of the file at `path`; nothing of the data is read.

    Raises:
      CheckpointError: with every fault of the file.
    """
    try:
        size = path.stat().st_size
        if size < 8:
            # Not even opened: a pipe or a device has no size, and reading it might never end.
            header_length(b"", size, path.name)
        with open(path, "rb") as stream:
            length = header_length(stream.read(8), size, path.name)
            header = stream.read(length)
    except OSError as error:
        raise CheckpointError([f"{path.name}: cannot be read: {error.strerror or error}"]) from None
    if len(header) != length:
        raise CheckpointError([f"{path.name}: its header ends after {len(header)} of {length} bytes"])
    return parse_header(header, size, path.name)
