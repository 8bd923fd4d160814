"""A checkpoint directory opened strictly: the index, the headers and the schema must agree before a tensor is read.

Tensors are read-only views of memory maps; nothing is copied, cast or sharded here. Pages of tensors handed out earlier
are given back to the kernel on the way, so that walking over a checkpoint of any size keeps little of it resident.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from numpy.typing import NDArray

from checkpoints.errors import CheckpointError, shown
from checkpoints.index_file import INDEX_NAME, Index, read_index
from checkpoints.safetensors_file import MappedFile, TensorEntry, read_header
from checkpoints.schema import BLOCK_OF_SCALE, SCOPES, TensorSpec, scope_of, tensor_schema
from v41jax.config import ConfigError, ModelConfig

RESIDENT_LIMIT = 2**27
"""Bytes of tensors handed out before their pages are given back."""


class Checkpoint:
    """An open checkpoint directory, limited to the scopes asked for; use `open`, and `close` or `with`.

    Attributes:
      config: the validated `config.json`.
      directory: where the files are.
      schema: spec of every tensor of the opened scopes, in the order of the network.
    """

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        schema: dict[str, TensorSpec],
        entries: dict[str, tuple[str, TensorEntry]],
    ):
        self.directory = directory
        self.config = config
        self.schema = schema
        self._entries = entries
        self._files = {shard: MappedFile(directory / shard) for shard in {shard for shard, _ in entries.values()}}
        self._handed_bytes = 0
        self._lock = threading.Lock()

    @classmethod
    def open(cls, directory: Path | str, scopes: Iterable[str] = ("text",)) -> Checkpoint:
        """Opens a directory in the released layout and checks everything but the tensors' contents.

        Args:
          directory: holds `config.json`, the index and the shards.
          scopes: any of `text`, `draft`, `vision`; tensors of other scopes may be absent.

        Raises:
          CheckpointError: with one line for every fault, each naming the file and the tensor.
        """
        directory = Path(directory)
        scopes = tuple(scopes)
        config = read_config(directory)
        index = read_index(directory)
        full = tensor_schema(config)
        faults = index_faults(index, full, scopes)
        wanted = {name: spec for name, spec in full.items() if scope_of(name) in scopes and name in index.weight_map}
        shards = sorted({index.weight_map[name] for name in wanted})
        entries, shard_faults = read_shards(directory, index, shards, wanted)
        faults += shard_faults
        if faults:
            raise CheckpointError(faults)
        return cls(directory, config, wanted, entries)

    @property
    def names(self) -> tuple[str, ...]:
        """Tensor names of the opened scopes, in the order of the network."""
        return tuple(self.schema)

    def tensor(self, name: str) -> NDArray[Any]:
        """A read-only view of a tensor as stored: `float8_e4m3fn`, `bfloat16`, `float32`, or uint8 codes.

        E8M0 scales and packed FP4 weights (low nibble first) are uint8. The view may be unaligned, stays valid after
        `close`, and does not stay resident: copy what is read often.

        Raises:
          KeyError: no such tensor in the opened scopes.
          CheckpointError: the checkpoint is closed, or its file changed since it was opened.
        """
        shard, entry = self._entry(name)
        self._bound_resident_pages(entry.end - entry.begin)
        return self._files[shard].array(entry)

    def _bound_resident_pages(self, coming: int) -> None:
        """Gives pages back before `coming` bytes are handed out; a view still in use is read again on access."""
        with self._lock:
            if self._handed_bytes + coming > RESIDENT_LIMIT:
                for file in self._files.values():
                    file.give_back_pages()
                self._handed_bytes = 0
            self._handed_bytes += coming

    def location(self, name: str) -> tuple[Path, TensorEntry]:
        """The file of a tensor and its byte range there."""
        shard, entry = self._entry(name)
        return self.directory / shard, entry

    def close(self) -> None:
        """Closes every file; closing again does nothing."""
        for file in self._files.values():
            file.close()

    def _entry(self, name: str) -> tuple[str, TensorEntry]:
        try:
            return self._entries[name]
        except KeyError:
            raise KeyError(f"{shown(name)} is not in the opened scopes of {self.directory}") from None

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def available_scopes(directory: Path | str) -> frozenset[str]:
    """Scopes of which a checkpoint's index names at least one tensor; nothing but the index is read.

    Raises:
      CheckpointError: the index cannot be used.
    """
    return frozenset(scope_of(name) for name in read_index(Path(directory)).weight_map)


def read_config(directory: Path) -> ModelConfig:
    """`config.json` of a checkpoint directory; every fault of it becomes a `CheckpointError`."""
    try:
        return ModelConfig.from_file(directory / "config.json")
    except ConfigError as error:
        raise CheckpointError([f"config.json: {fault}" for fault in error.faults]) from None
    except OSError as error:
        raise CheckpointError([f"config.json: cannot be read: {error.strerror or error}"]) from None


def index_faults(index: Index, schema: dict[str, TensorSpec], scopes: Iterable[str]) -> list[str]:
    """Differences between the index and the full schema; tensors of scopes not asked for may be missing."""
    scopes = tuple(scopes)
    unknown = [scope for scope in scopes if scope not in SCOPES]
    if unknown:
        raise ValueError(f"unknown scope {unknown[0]!r}; choose from {', '.join(SCOPES)}")
    faults = [
        f"{INDEX_NAME}: {name}: missing" for name in schema if name not in index.weight_map and scope_of(name) in scopes
    ]
    faults += [
        f"{INDEX_NAME}: {shown(name)}: not a tensor of this configuration"
        for name in index.weight_map
        if name not in schema
    ]
    if index.total_size is not None and not faults:
        total = sum(schema[name].nbytes for name in index.weight_map)
        if total != index.total_size:
            faults.append(f"{INDEX_NAME}: metadata.total_size is {index.total_size}, the tensors have {total} bytes")
    return faults


def read_shards(
    directory: Path, index: Index, shards: Iterable[str], wanted: dict[str, TensorSpec]
) -> tuple[dict[str, tuple[str, TensorEntry]], list[str]]:
    """Reads the headers of `shards` and compares them with the index and the specs of `wanted`.

    Returns:
      shard and entry of every tensor of `wanted` that was found, and one line for every fault.
    """
    entries: dict[str, tuple[str, TensorEntry]] = {}
    faults: list[str] = []
    readable = set()
    for shard in shards:
        try:
            header, _ = read_header(directory / shard)
        except CheckpointError as error:
            faults += error.faults
            continue
        readable.add(shard)
        for name, entry in header.items():
            home = index.weight_map.get(name)
            if home is None:
                faults.append(f"{shard}: {shown(name)}: not in {INDEX_NAME}")
            elif home != shard:
                faults.append(f"{shard}: {shown(name)}: {INDEX_NAME} places it in {home}")
            elif name in wanted:
                entries[name] = (shard, entry)
                faults += (f"{shard}: {name}: {fault}" for fault in _spec_faults(entry, wanted[name]))
    for name in wanted:
        if name not in entries and index.weight_map[name] in readable:
            faults.append(f"{index.weight_map[name]}: {name}: missing, although {INDEX_NAME} places it there")
    return entries, faults


def _spec_faults(entry: TensorEntry, spec: TensorSpec) -> Iterator[str]:
    if entry.dtype != spec.dtype:
        yield f"dtype {entry.dtype}, expected {spec.dtype} ({spec.role.value})"
    if entry.shape != spec.shape:
        rule = ""
        if spec.role in BLOCK_OF_SCALE:
            rows, columns = BLOCK_OF_SCALE[spec.role]
            rule = f" (one scale for {rows} x {columns} elements)"
        yield f"shape {list(entry.shape)}, expected {list(spec.shape)}{rule}"
