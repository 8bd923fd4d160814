"""The Engram tables of an open checkpoint: memory-mapped for as long as any reader needs them, gathered by row id.

Rows come out as stored codes; nothing is converted, and no table is ever copied or cast as a whole
(Engram chapter, "Tables on disk and in host memory").
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from checkpoints.errors import CheckpointError
from checkpoints.load import Checkpoint
from checkpoints.safetensors_file import MappedFile


class _Part(NamedTuple):
    file: MappedFile
    rows: NDArray[np.uint8]


class EngramTables:
    """The tables of every Engram layer, opened once and closed once, independent of the checkpoint object's life.

    Attributes:
      rows: rows of each layer's table.
      head_dim: values of a row.
    """

    def __init__(self, checkpoint: Checkpoint):
        text = checkpoint.config.text
        self.rows = text.engram_num_embeddings
        self.head_dim = text.engram_head_dim
        self._files: dict[Path, MappedFile] = {}
        self._tables: list[tuple[_Part, _Part]] | None = [
            (
                self._part(checkpoint, f"layers.{layer}.engram.embed.weight"),
                self._part(checkpoint, f"layers.{layer}.engram.embed.scale"),
            )
            for layer in text.engram_layer_ids
        ]

    def _part(self, checkpoint: Checkpoint, name: str) -> _Part:
        checkpoint.tensor(name)  # refuses a file that changed since its header was checked
        path, entry = checkpoint.location(name)
        if path not in self._files:
            self._files[path] = MappedFile(path, random_access=True)
        file = self._files[path]
        return _Part(file, file.array(entry).view(np.uint8))

    @classmethod
    def open(cls, checkpoint: Checkpoint) -> EngramTables:
        """Maps the tables of a checkpoint opened with scope `text`.

        Raises:
          CheckpointError: a file cannot be mapped or changed since the checkpoint was opened.
        """
        return cls(checkpoint)

    def gather(self, layer_ordinal: int, row_ids: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Rows of one layer's table; equal ids are read once, in ascending order.

        Args:
          layer_ordinal: position of the layer in `engram_layer_ids`.
          row_ids: [n] int64, 0 <= id < `rows[layer_ordinal]`.

        Returns:
          E4M3 codes uint8 [n, head_dim] and E8M0 codes uint8 [n, head_dim / 32].

        Raises:
          IndexError: a row id outside the table, which means a wrong hash layout.
          CheckpointError: the tables are closed, or a file changed under them.
        """
        tables = self._tables
        if tables is None:
            raise CheckpointError(["the Engram tables are closed"])
        weight, scale = tables[layer_ordinal]
        count = len(weight.rows)
        unique, inverse = np.unique(np.asarray(row_ids), return_inverse=True)
        if unique.size and not 0 <= unique[0] <= unique[-1] < count:
            bad = unique[0] if unique[0] < 0 else unique[-1]
            raise IndexError(f"Engram row {bad} lies outside the {count} rows of table {layer_ordinal}")
        for file in {weight.file, scale.file}:
            file.check_unchanged()
        return weight.rows[unique][inverse], scale.rows[unique][inverse]

    def close(self) -> None:
        """Ends the mappings once the last running gather is done; closing again does nothing."""
        self._tables = None
        for file in self._files.values():
            file.close()

    def __enter__(self) -> EngramTables:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
