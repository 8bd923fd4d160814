"""Writes the released layout: sharded safetensors files, their index and `config.json`.

Tensor bytes arrive as chunks and go straight to the file, so that nothing larger than a chunk is held. The index is
written last: a directory whose writing was interrupted does not open.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from checkpoints.errors import CheckpointError, shown
from checkpoints.index_file import INDEX_NAME
from checkpoints.safetensors_file import ITEM_SIZES
from checkpoints.schema import TensorSpec
from v41jax.config import ModelConfig

Contents = Callable[[str, TensorSpec], Iterable[NDArray[Any]]]
"""Gives the stored elements of a tensor in row-major order, as arrays of any shape, one or many."""

DEFAULT_SHARD_BYTES = 5 * 2**30


def plan_shards(schema: Mapping[str, TensorSpec], shard_bytes: int) -> list[list[str]]:
    """Tensor names of every shard: schema order, cut before a shard would exceed `shard_bytes`.

    A tensor larger than the limit gets a shard of its own. Within a shard wide elements come first, so that every
    tensor is aligned to its elements.
    """
    if shard_bytes < 1:
        raise ValueError(f"a shard of {shard_bytes} bytes holds nothing; give at least 1")
    shards: list[list[str]] = []
    filled = shard_bytes + 1
    for name, spec in schema.items():
        if filled + spec.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += spec.nbytes
    return [sorted(shard, key=lambda name: -ITEM_SIZES[schema[name].dtype]) for shard in shards]


def shard_header(names: Iterable[str], schema: Mapping[str, TensorSpec]) -> bytes:
    """Length prefix and JSON of a shard holding `names` in that order, padded to a multiple of 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        spec = schema[name]
        entries[name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def write_checkpoint(
    directory: Path | str,
    config: ModelConfig,
    schema: Mapping[str, TensorSpec],
    contents: Contents,
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Writes a checkpoint directory.

    Args:
      directory: created when absent; must not hold a checkpoint.
      config: written as `config.json`.
      schema: the tensors to write, usually `tensor_schema(config)`.
      contents: called once for every tensor, in file order.
      shard_bytes: largest shard, unless one tensor alone is larger.
      progress: called with the bytes just written.

    Raises:
      CheckpointError: the directory holds a checkpoint, or the disk has too little room.
      ValueError: `contents` gave another number of bytes than the schema states.
    """
    directory = Path(directory)
    total = sum(spec.nbytes for spec in schema.values())
    prepare_directory(directory, total)
    (directory / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")
    shards = plan_shards(schema, shard_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        chunks = (chunk for name in names for chunk in _checked(name, schema[name], contents))
        _write_file(directory / file, shard_header(names, schema), chunks, progress)
        weight_map.update((name, file) for name in names)
    ordered = {name: weight_map[name] for name in schema}
    index = json.dumps({"metadata": {"total_size": total}, "weight_map": ordered}, indent=1)
    _write_file(directory / INDEX_NAME, index.encode(), (), None)


def prepare_directory(directory: Path, needed: int) -> None:
    """Creates the directory and refuses one that holds a checkpoint or has fewer than `needed` bytes free."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        taken = sorted(path.name for path in directory.glob("*.safetensors*"))
    except OSError as error:
        raise CheckpointError([f"{directory}: cannot be created: {error.strerror or error}"]) from None
    if taken:
        raise CheckpointError([f"{directory}: already holds {shown(taken[0])}; choose an empty directory"])
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise CheckpointError([f"{directory}: needs {needed} bytes, the disk has {free} free"])


def _checked(name: str, spec: TensorSpec, contents: Contents) -> Iterator[memoryview]:
    written = 0
    for chunk in contents(name, spec):
        data = chunk.reshape(-1).view(np.uint8).data
        written += data.nbytes
        yield data
    if written != spec.nbytes:
        raise ValueError(f"{name}: contents gave {written} bytes, the schema states {spec.nbytes}")


def _write_file(path: Path, start: bytes, chunks: Iterable[memoryview], progress: Callable[[int], None] | None) -> None:
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as stream:
            stream.write(start)
            for chunk in chunks:
                stream.write(chunk)
                if progress is not None:
                    progress(chunk.nbytes)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
