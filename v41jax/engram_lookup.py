"""The host half of an Engram layer: from the compressed ids of a flat batch to table rows in their stored codes.

Hashing is in `engram_hashing`, the memory-mapped tables in `checkpoints.engram_tables`; this file joins them. Nothing
is widened here: a step receives the bytes and dequantizes the few rows it uses.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scheduler.batch import DEAD, BatchStep, EngramRows
from v41jax.config import ModelConfig
from v41jax.engram_hashing import EngramHasher

_SCALE_BLOCK = 32
_SCALE_ONE = 127  # the E8M0 code of 1: a padding row decodes to zero


class RowSource(Protocol):
    """Where rows come from; `checkpoints.engram_tables.EngramTables` is one."""

    def gather(self, layer_ordinal: int, row_ids: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """[n] row ids to E4M3 codes uint8 [n, head_dim] and E8M0 codes uint8 [n, head_dim // 32]."""
        ...


class EngramLookup:
    """Looks up the rows of a whole batch, one gather a table.

    The tables belong to the caller, who opens them before and closes them after the last lookup.
    """

    def __init__(self, config: ModelConfig, token_map: NDArray[np.int32], tables: RowSource):
        """Args:
        config: the whole configuration.
        token_map: [n >= vocab_size] int32.
        tables: rows of every Engram layer, in the order of `engram_layer_ids`.
        """
        self.hasher = EngramHasher(config, token_map)
        self._tables = tables
        self._head_dim = config.text.engram_head_dim
        self._layers = len(config.text.engram_layer_ids)

    def rows(self, compressed_ids: ArrayLike, histories: ArrayLike, cu_seqlens: ArrayLike) -> EngramRows:
        """Table rows of a flat batch.

        Args:
          compressed_ids: [N] compressed ids, DEAD for image rows and padding.
          histories: [R, Hh] compressed ids before each request's first row, oldest first, DEAD where there is nothing.
          cu_seqlens: [R + 1] row offsets of the requests; rows from cu_seqlens[-1] on are padding.

        Returns:
          `EngramRows` of N rows. Padding and DEAD rows are not read from the tables: codes 0, scales 127.

        Raises:
          EngramIdError: an id that is neither DEAD nor a compressed id.
        """
        compressed = np.asarray(compressed_ids)
        total = int(np.asarray(cu_seqlens)[-1])
        row_ids = self.hasher.batch_row_ids(compressed, histories, cu_seqlens)
        live = np.flatnonzero(compressed[:total] != DEAD)
        shape = (compressed.shape[0], self.hasher.columns)
        codes = [np.zeros((*shape, self._head_dim), np.uint8) for _ in range(self._layers)]
        scales = [np.full((*shape, self._head_dim // _SCALE_BLOCK), _SCALE_ONE, np.uint8) for _ in range(self._layers)]
        for layer in range(self._layers) if live.size else ():
            stored_codes, stored_scales = self._tables.gather(layer, row_ids[live, layer].reshape(-1))
            codes[layer][live] = stored_codes.reshape(live.size, self.hasher.columns, -1)
            scales[layer][live] = stored_scales.reshape(live.size, self.hasher.columns, -1)
        return EngramRows(codes=tuple(codes), scales=tuple(scales))

    def step_rows(self, step: BatchStep) -> EngramRows:
        """`rows` for the arrays of one host-side `BatchStep`, whose token ids must all be known (none -1).

        Of the joined steps of several data shards the rows of all, one shard after the other.
        """
        shards = len(step.cu_seqlens) - len(step.slots)  # each has one offset more than requests
        fields = (step.compressed_ids, step.history, step.cu_seqlens)
        columns = (np.split(np.asarray(field), shards) for field in fields)
        parts = [self.rows(*column) for column in zip(*columns, strict=True)]
        if shards == 1:
            return parts[0]
        codes = zip(*(part.codes for part in parts), strict=True)
        scales = zip(*(part.scales for part in parts), strict=True)
        return EngramRows(tuple(map(np.concatenate, codes)), tuple(map(np.concatenate, scales)))
