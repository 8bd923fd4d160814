"""Checks a whole checkpoint directory and reports everything that is wrong with it, not the first fault alone.

Names, shapes, dtypes and byte ranges come from the headers; contents are read once, in pieces, and looked at only for
values that no weight can have: NaN scale codes, NaN or infinite weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from checkpoints.errors import CheckpointError, shown
from checkpoints.index_file import INDEX_NAME, read_index
from checkpoints.load import index_faults, read_config, read_shards
from checkpoints.safetensors_file import ARRAY_DTYPES, MappedFile, TensorEntry
from checkpoints.schema import SCOPES, TensorSpec, tensor_schema

PIECE = 2**22
"""Bytes of a tensor looked at together."""

RESIDENT_LIMIT = 2**25
"""Bytes read before their pages are given back."""


@dataclasses.dataclass(frozen=True)
class Verification:
    """Result of `verify`.

    Attributes:
      tensors: tensors the configuration asks for; 0 when it cannot be read.
      nbytes: their bytes.
      shards: files the index names.
      faults: one line for every fault, naming file and tensor.
    """

    tensors: int
    nbytes: int
    shards: int
    faults: tuple[str, ...]


def verify(
    directory: Path | str, *, contents: bool = True, progress: Callable[[int, int], None] | None = None
) -> Verification:
    """Checks every tensor's name, shape, dtype, block rule and byte range, and whether its values are possible.

    Args:
      directory: a checkpoint in the released layout.
      contents: read the tensors too, not the headers alone.
      progress: called with bytes read so far and bytes to read.
    """
    directory = Path(directory)
    faults: list[str] = []
    schema: dict[str, TensorSpec] = {}
    try:
        schema = tensor_schema(read_config(directory))
    except CheckpointError as error:
        faults += error.faults
    try:
        index = read_index(directory)
    except CheckpointError as error:
        faults += error.faults
        return Verification(len(schema), _total(schema), 0, tuple(faults))
    shards = sorted(set(index.weight_map.values()))
    if schema:
        faults += index_faults(index, schema, SCOPES)
    wanted = {name: spec for name, spec in schema.items() if name in index.weight_map}
    entries, shard_faults = read_shards(directory, index, shards, wanted)
    faults += shard_faults
    faults += (
        f"{shown(path.name)}: not named by {INDEX_NAME}"
        for path in sorted(directory.glob("*.safetensors"))
        if path.name not in shards
    )
    if contents:
        faults += content_faults(directory, entries, progress)
    return Verification(len(schema), _total(schema), len(shards), tuple(faults))


def _total(schema: dict[str, TensorSpec]) -> int:
    return sum(spec.nbytes for spec in schema.values())


def content_faults(
    directory: Path,
    entries: dict[str, tuple[str, TensorEntry]],
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[str]:
    """Faults of the values of tensors whose headers were read; one line a tensor."""
    readable = {name: place for name, place in entries.items() if place[1].dtype in ARRAY_DTYPES}
    total = sum(entry.end - entry.begin for _, entry in readable.values())
    done = resident = 0
    files: dict[str, MappedFile] = {}
    for name, (shard, entry) in readable.items():
        try:
            if shard not in files:
                files[shard] = MappedFile(directory / shard)
            flat = files[shard].array(entry).reshape(-1)
        except CheckpointError as error:
            yield from error.faults
            continue
        count, first = 0, -1
        step = PIECE // flat.itemsize
        for begin in range(0, flat.size, step):
            piece = flat[begin : begin + step]
            bad = np.flatnonzero(_impossible(piece, entry.dtype))
            if bad.size and not count:
                first = begin + int(bad[0])
            count += bad.size
            done += piece.nbytes
            resident += piece.nbytes
            if resident > RESIDENT_LIMIT:
                for file in files.values():
                    file.give_back_pages()
                resident = 0
            if progress is not None:
                progress(done, total)
        if count:
            what = "NaN scale codes (255)" if entry.dtype == "F8_E8M0" else "values that are NaN or infinite"
            position = [int(axis) for axis in np.unravel_index(first, entry.shape)]
            yield f"{shard}: {name}: {count} {what}, the first at {position}"
    for file in files.values():
        file.close()


def _impossible(values: NDArray[Any], dtype: str) -> NDArray[np.bool_]:
    """Which values no weight can have. Bits are compared, several times faster than floating point tests."""
    match dtype:
        case "F32":
            return np.asarray((values.view(np.uint32) & np.uint32(0x7F800000)) == 0x7F800000)
        case "BF16":
            return np.asarray((values.view(np.uint16) & np.uint16(0x7F80)) == 0x7F80)
        case "F8_E4M3":
            return np.asarray((values.view(np.uint8) & np.uint8(0x7F)) == 0x7F)
        case "F8_E8M0":
            return np.asarray(values == 255)
    return np.zeros(values.shape, np.bool_)
