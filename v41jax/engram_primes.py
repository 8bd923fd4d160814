"""The bucket counts of the Engram hash tables: a walk over primes fixed by the config.

Pure Python and cached: the config validator and the hasher both need it.
Source: Engram chapter, "Prime layout".
"""

from __future__ import annotations

import functools
from typing import Any

_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
"""Miller-Rabin bases that decide every integer below 3.3e24."""


def is_prime(number: int) -> bool:
    """Deterministic for any `number` below 3.3e24."""
    if number < 2:
        return False
    for prime in _WITNESSES:
        if number % prime == 0:
            return number == prime
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for witness in _WITNESSES:
        power = pow(witness, odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True


@functools.lru_cache(maxsize=64)
def engram_primes(
    layer_ids: tuple[int, ...], vocab_size: int, max_ngram_size: int, heads: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Primes `[layer][order][head]` for n-gram orders 2 .. `max_ngram_size`.

    The search restarts at `vocab_size` (`engram_vocab_size`) for every (layer, order) and never takes a prime twice.
    The sum over a layer is its number of table rows, and column order is (order, head).
    """
    used: set[int] = set()

    def order_primes() -> tuple[int, ...]:
        primes: list[int] = []
        candidate = vocab_size - 1
        while len(primes) < heads:
            candidate += 1
            if candidate not in used and is_prime(candidate):
                primes.append(candidate)
                used.add(candidate)
        return tuple(primes)

    return tuple(tuple(order_primes() for _ in range(max_ngram_size - 1)) for _ in layer_ids)


def engram_rows(layer_ids: tuple[int, ...], vocab_size: int, max_ngram_size: int, heads: int) -> tuple[int, ...]:
    """Table rows of every Engram layer: the sums of its primes."""
    layers = engram_primes(layer_ids, vocab_size, max_ngram_size, heads)
    return tuple(sum(map(sum, layer)) for layer in layers)


def set_engram_rows(text: dict[str, Any]) -> None:
    """Sets the table rows of a `text_config`, `engram_num_embeddings`, to those of its other Engram keys."""
    text["engram_num_embeddings"] = list(
        engram_rows(
            tuple(text["engram_layer_ids"]),
            text["engram_vocab_size"],
            text["engram_max_ngram_size"],
            text["engram_n_heads"],
        )
    )
