"""Engram row ids on the device: the 64-bit hash in 16-bit pieces, for whole sequences from position 0."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from v41jax.config import ModelConfig
from v41jax.engram_hashing import EngramHasher

Array = jax.Array

_PIECES = 4


class HashTables(NamedTuple):
    """Constants of the hash.

    Attributes:
      token_map: [V] int32, compressed ids.
      pad: int32 scalar, what stands for a token before the sequence.
      products: [layers, shifts, C, 4] uint32, compressed id times multiplier in 16-bit pieces, most significant first.
      primes: [layers, columns] uint32.
      offsets: [layers, columns] int32.
    """

    token_map: Array
    pad: Array
    products: Array
    primes: Array
    offsets: Array


def hash_tables(config: ModelConfig, token_map: NDArray[np.int32]) -> HashTables:
    """Constants for a configuration whose primes are below 2^16.

    Raises:
      ValueError: larger hash tables than this arithmetic can address.
    """
    hasher = EngramHasher(config, token_map)
    if hasher.primes.max(initial=0) >= 2**16:
        raise ValueError(f"the largest prime is {hasher.primes.max()}: device hashing needs primes below 65536")
    ids = np.arange(config.text.engram_compressed_vocab_size, dtype=np.int64)
    products = hasher.multipliers[:, :, None] * ids
    shifts = 16 * np.arange(_PIECES - 1, -1, -1)
    pieces = (products[..., None] >> shifts) & 0xFFFF
    return HashTables(
        token_map=jnp.asarray(token_map, jnp.int32),
        pad=jnp.asarray(hasher.pad, jnp.int32),
        products=jnp.asarray(pieces, jnp.uint32),
        primes=jnp.asarray(hasher.primes, jnp.uint32),
        offsets=jnp.asarray(hasher.offsets, jnp.int32),
    )


def row_ids(tables: HashTables, token_ids: Array, layer: int) -> Array:
    """Table rows of every token of sequences that start at position 0 (Engram specification, "Hash").

    Args:
      tables: of the configuration.
      token_ids: [B, L] int32.
      layer: Engram ordinal.

    Returns:
      [B, L, columns] int32.
    """
    compressed = tables.token_map[token_ids]
    shifts = tables.products.shape[1]
    heads = tables.primes.shape[1] // (shifts - 1)
    length = compressed.shape[1]
    columns = []
    mixed = tables.products[layer, 0][compressed]
    for shift in range(1, shifts):
        before = jnp.pad(compressed, ((0, 0), (shift, 0)))[:, :length]
        value = jnp.where(jnp.arange(length) < shift, tables.pad, before)
        mixed = mixed ^ tables.products[layer, shift][value]
        order = slice((shift - 1) * heads, shift * heads)
        primes = tables.primes[layer, order]
        rest = jnp.zeros((*compressed.shape, heads), jnp.uint32)
        for piece in range(_PIECES):
            rest = (rest * jnp.uint32(65536) + mixed[..., piece, None]) % primes
        columns.append(rest.astype(jnp.int32) + tables.offsets[layer, order])
    return jnp.concatenate(columns, axis=-1)
