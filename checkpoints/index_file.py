"""`model.safetensors.index.json`: which shard holds which tensor."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError, shown
from checkpoints.safetensors_file import parse_json

INDEX_NAME = "model.safetensors.index.json"
INDEX_LIMIT = 500_000_000
"""Longest index accepted, bytes; the released one has about 10 million."""


@dataclasses.dataclass(frozen=True)
class Index:
    """Contents of an index file.

    Attributes:
      weight_map: shard file name of every tensor.
      total_size: `metadata.total_size`, bytes of all tensors; None when absent.
    """

    weight_map: dict[str, str]
    total_size: int | None


def read_index(directory: Path) -> Index:
    """Reads the index of a checkpoint directory.

    Raises:
      CheckpointError: with every fault of the file.
    """
    path = directory / INDEX_NAME
    try:
        size = path.stat().st_size
        if size > INDEX_LIMIT:
            raise CheckpointError([f"{INDEX_NAME}: {size} bytes; the limit is {INDEX_LIMIT}"])
        if not size:
            # Not even opened: reading a pipe or a device might never end.
            raise CheckpointError([f"{INDEX_NAME}: is empty"])
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError([f"{INDEX_NAME}: cannot be read: {error.strerror or error}"]) from None
    return parse_index(data)


def parse_index(data: bytes) -> Index:
    """Parses and checks the bytes of an index file; raises as `read_index`."""
    try:
        root = parse_json(data)
    except ValueError as error:
        raise CheckpointError([f"{INDEX_NAME}: {error}"]) from None
    if not isinstance(root, dict) or not isinstance(root.get("weight_map"), dict):
        raise CheckpointError([f"{INDEX_NAME}: must be an object with an object weight_map"])
    faults = []
    weight_map: dict[str, str] = {}
    for name, shard in root["weight_map"].items():
        if _is_file_name(shard):
            weight_map[name] = shard
        else:
            faults.append(f"{INDEX_NAME}: {shown(name)}: shard {shown(shard)} is not the name of a file beside it")
    metadata = root.get("metadata", {})
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if not isinstance(metadata, dict):
        faults.append(f"{INDEX_NAME}: metadata must be an object")
    elif total is not None and (not isinstance(total, int) or isinstance(total, bool)):
        faults.append(f"{INDEX_NAME}: metadata.total_size {shown(total)} must be a whole number of bytes")
    if faults:
        raise CheckpointError(faults)
    return Index(weight_map, total)


def _is_file_name(value: Any) -> bool:
    if not isinstance(value, str) or not value or len(value) > 255 or value in (".", ".."):
        return False
    return value.isprintable() and not set(value) & set("/\\:")
