"""Which table rows a token's n-grams select: compression, look-back windows and 64-bit hashing, on the host.

NumPy only. Hashing needs int64, which JAX truncates by default, and depends on token ids alone, so it runs between
steps. Gathering the rows is in `engram_lookup`, what a layer does with them in `layers/engram`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scheduler.batch import DEAD
from v41jax.config import ModelConfig
from v41jax.engram_primes import engram_primes

_LAYER_SEED_STRIDE = 10007


class EngramIdError(ValueError):
    """A token id or compressed id outside the range the hash is defined for."""


def hash_multipliers(
    layer_ids: tuple[int, ...], compressed_vocab_size: int, shifts: int, seed: int
) -> NDArray[np.int64]:
    """One odd multiplier per (layer, look-back shift), [layers, shifts] int64.

    The bound keeps every product of a compressed id and a multiplier below 2^63.

    Source: Engram specification, "Hash multipliers".
    """
    bound = max(1, (2**63 - 1) // compressed_vocab_size // 2)
    rows = [
        2 * np.random.default_rng(seed + _LAYER_SEED_STRIDE * layer).integers(0, bound, size=shifts, dtype=np.int64) + 1
        for layer in layer_ids
    ]
    return np.array(rows, np.int64).reshape(len(layer_ids), shifts)


def history_before(compressed_ids: ArrayLike, position: int, size: int) -> NDArray[np.int32]:
    """The `size` compressed ids before `position` of a sequence, oldest first, DEAD before its start; [size] int32.

    Args:
      compressed_ids: [n] ids of the sequence from position 0, n >= position.
    """
    ids = np.asarray(compressed_ids, np.int32)
    kept = ids[max(0, position - size) : position]
    return np.concatenate([np.full(size - kept.size, DEAD, np.int32), kept])


class EngramHasher:
    """The hash of one configuration.

    Attributes:
      history_size: look-back length Hh = engram_max_ngram_size - 1.
      columns: table rows per token and layer, (n-gram orders) x (heads).
      pad: compressed id that stands for "nothing there" inside a hash.
      primes: [layers, columns] int64, bucket counts in (order, head) order.
      offsets: [layers, columns] int64, first table row of each column.
      multipliers: [layers, Hh + 1] int64.
    """

    def __init__(self, config: ModelConfig, token_map: NDArray[np.int32]):
        """Args:
          config: the whole configuration.
          token_map: [n >= vocab_size] int32, checked by `token_map.check_token_map`.

        Raises:
          ValueError: the primes of a layer do not add up to its table rows.
        """
        text = config.text
        self._token_map = np.asarray(token_map, np.int32)
        self._compressed_size = text.engram_compressed_vocab_size
        self.history_size = text.engram_max_ngram_size - 1
        self.columns = self.history_size * text.engram_n_heads
        self.pad = int(self._token_map[text.engram_pad_token_id])
        layers = len(text.engram_layer_ids)
        self.primes = np.array(
            engram_primes(
                text.engram_layer_ids, text.engram_vocab_size, text.engram_max_ngram_size, text.engram_n_heads
            ),
            np.int64,
        ).reshape(layers, self.columns)
        rows = self.primes.sum(axis=1)
        faults = [
            f"layer {layer}: the {self.columns} primes add up to {found} rows, the config states {stated}"
            for layer, found, stated in zip(text.engram_layer_ids, rows, text.engram_num_embeddings)
            if found != stated
        ]
        if faults:
            raise ValueError("engram_num_embeddings does not fit the prime layout: " + "; ".join(faults))
        self.offsets = np.cumsum(self.primes, axis=1) - self.primes
        self.multipliers = hash_multipliers(
            text.engram_layer_ids, self._compressed_size, self.history_size + 1, text.engram_seed
        )

    @property
    def token_map(self) -> NDArray[np.int32]:
        """[n] int32, compressed id of every token id."""
        return self._token_map

    def compress(self, ids: ArrayLike, dead_mask: ArrayLike | None = None) -> NDArray[np.int32]:
        """Compressed ids of tokens.

        Args:
          ids: [n] token ids; values under the mask are not read.
          dead_mask: [n] bool, tokens that take no part (image spans, padding); None means none.

        Returns:
          [n] int32, DEAD where masked.

        Raises:
          EngramIdError: an unmasked id outside the token map.
        """
        ids = np.asarray(ids)
        dead = np.zeros(ids.shape, bool) if dead_mask is None else np.asarray(dead_mask, bool)
        wrong = ~dead & ((ids < 0) | (ids >= self._token_map.size))
        if wrong.any():
            offset, last = np.flatnonzero(wrong)[0], self._token_map.size - 1
            raise EngramIdError(f"token id {ids[offset]} at offset {offset} is outside 0..{last}")
        return np.where(dead, np.int32(DEAD), self._token_map[np.where(dead, 0, ids)])

    def row_ids(self, compressed_with_history: ArrayLike) -> NDArray[np.int64]:
        """Table rows of one run of tokens.

        Args:
          compressed_with_history: [Hh + n] compressed ids; the first Hh precede the run, DEAD where there is nothing.

        Returns:
          [n, layers, columns] int64. Rows of DEAD tokens are defined (everything is pad) but never used.

        Raises:
          EngramIdError: an id that is neither DEAD nor a compressed id.
        """
        ids = np.asarray(compressed_with_history, np.int64)
        rows = np.arange(self.history_size, ids.size)
        return self._hash(ids[rows[:, None] - np.arange(self.history_size + 1)])

    def batch_row_ids(
        self, compressed_ids: ArrayLike, histories: ArrayLike, cu_seqlens: ArrayLike
    ) -> NDArray[np.int64]:
        """Table rows of a flat batch of requests, one vectorised pass.

        Args:
          compressed_ids: [N] compressed ids, rows of a request consecutive; rows past the last request are not read.
          histories: [R, Hh] compressed ids before each request's first row, oldest first.
          cu_seqlens: [R + 1] row offsets of the requests, from 0, not decreasing.

        Returns:
          [cu_seqlens[-1], layers, columns] int64.

        Raises:
          EngramIdError: as `row_ids`.
        """
        histories = np.asarray(histories, np.int64).reshape(-1, self.history_size)
        bounds = np.asarray(cu_seqlens, np.int64)
        total = int(bounds[-1])
        ids = np.asarray(compressed_ids, np.int64)[:total]
        lengths = np.diff(bounds)
        # Every request's history is laid before its rows, so that a look-back is a plain shift.
        request = np.repeat(np.arange(lengths.size), lengths)
        place = np.arange(total) + (request + 1) * self.history_size
        joined = np.full(total + lengths.size * self.history_size, DEAD, np.int64)
        joined[place] = ids
        first = bounds[:-1] + np.arange(lengths.size) * self.history_size
        joined[first[:, None] + np.arange(self.history_size)] = histories
        return self._hash(joined[place[:, None] - np.arange(self.history_size + 1)])

    def _hash(self, windows: NDArray[np.int64]) -> NDArray[np.int64]:
        """[n, Hh + 1] look-back windows (shift 0 first) -> [n, layers, columns] (Engram specification, "Hash")."""
        wrong = (windows != DEAD) & ((windows < 0) | (windows >= self._compressed_size))
        if wrong.any():
            raise EngramIdError(
                f"compressed id {windows[wrong][0]} is neither DEAD ({DEAD}) nor within 0..{self._compressed_size - 1}"
            )
        blocked = np.logical_or.accumulate(windows == DEAD, axis=1)
        values = np.where(blocked, self.pad, windows)
        heads = self.columns // self.history_size
        mixed = values[:, :1] * self.multipliers[:, 0]
        result = np.empty((windows.shape[0], *self.primes.shape), np.int64)
        for shift in range(1, self.history_size + 1):
            mixed = mixed ^ (values[:, shift, None] * self.multipliers[:, shift])
            order = slice((shift - 1) * heads, shift * heads)
            result[:, :, order] = mixed[:, :, None] % self.primes[:, order] + self.offsets[:, order]
        return result
