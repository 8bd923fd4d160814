"""Which exchange brings the rows of other data shards to whole experts, and how large a ragged one's places are.

Pure numbers, decided once for every program from its shapes. How rows move is in `v41jax.layers.expert_exchange`;
docs/pods.md derives the formulas.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from v41jax.config import TextConfig
from v41jax.layers.collectives import Parallel

SLACK = 1.25
"""Places of a destination, as a multiple of the copies that uniform routing sends it."""
DEVIATIONS = 4
"""Places of a destination, in standard deviations above those copies, where that is more: few rows vary more."""
PLACES_TILE = 16
"""Places are a multiple of it: rows of a bfloat16 register tile of the experts' kernel."""
READ_TO_SENT = 4
"""A chip reads at least so many bytes of its memory in the time it sends one (`v41jax.chips`: 4.1 on v5e and v6e)."""
ROUTING_BYTES = 8
"""Of one chosen expert that travels with a row: its id and its weight."""
SUM_BYTES = 4
"""Of one value of a sum that travels back, float32."""


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One exchange of a layer, decided.

    Attributes:
      ragged: rows go only where one of their experts is; otherwise every chip gathers all of them.
      rows: of one data shard.
      places: rows that a chip can send to each data shard in one round.
      expected: copies that uniform routing sends to each.
      rounds: that uniform routing is expected to take.
      gather_bytes, ragged_bytes: what a chip sends either way, the ragged one in one round.
    """

    ragged: bool
    rows: int
    places: int
    expected: float
    rounds: float
    gather_bytes: float
    ragged_bytes: float

    def describe(self, parallel: Parallel) -> str:
        """One line for reports."""
        if not self.ragged:
            return f"gather ({self.rows} rows of each of {parallel.data} data shards to every chip)"
        return (
            f"ragged ({self.rows} rows a data shard: {self.places} places for each of {parallel.data}, "
            f"{self.expected:.0f} expected, {self.rounds:.2f} rounds)"
        )


def chance(held: int, experts: int, top_k: int) -> float:
    """Probability that a row has chosen one of `held` of the experts, each set of `top_k` being as likely."""
    none = 1.0
    for index in range(held):
        none *= max(0, experts - top_k - index) / (experts - index)
    return 1 - none


def places_for(rows: int, probability: float) -> int:
    """Places of one destination: what `rows` are expected to take and a margin, never more than the rows."""
    expected = rows * probability
    wanted = max(SLACK * expected, expected + DEVIATIONS * math.sqrt(expected * (1 - probability)))
    return min(rows, PLACES_TILE * math.ceil(wanted / PLACES_TILE))


@functools.lru_cache(maxsize=4096)
def rounds_for(rows: int, probability: float, places: int, lists: int) -> float:
    """Rounds that uniform routing is expected to take, at most.

    Another round is needed when some list of rows is longer than its places, which is no likelier than the sum over all
    lists; every round takes at least `places` rows, so that the next one has that many less to be crowded by.

    Args:
      rows: of one data shard.
      probability: that a row is in a list.
      places: of each list.
      lists: of the mesh, one for every chip and data shard: what one chip has left, all go on with.
    """
    total, reached = 1.0, 1.0
    while rows > places:
        reached *= min(1.0, lists * _more_than(places, rows, probability))
        total += reached
        rows -= places
    return total


def _more_than(places: int, rows: int, probability: float) -> float:
    """Probability that more than `places` of independent rows are drawn; a binomial tail."""
    if probability >= 1:
        return float(rows > places)
    total, odds = 0.0, probability / (1 - probability)
    log = math.lgamma(rows + 1) - math.lgamma(places + 2) - math.lgamma(rows - places)
    term = math.exp(log + (places + 1) * math.log(probability) + (rows - places - 1) * math.log1p(-probability))
    for count in range(places + 1, rows + 1):
        total += term
        term *= (rows - count) / (count + 1) * odds
        if term < 1e-12 * total:
            break
    return total


def decide(
    parallel: Parallel,
    rows: int,
    *,
    top_k: int,
    held: int,
    width: int,
    expert_width: int,
    activation_bytes: int,
    quantized: bool,
) -> Exchange:
    """The exchange of a layer whose experts lie over both axes.

    The ragged one is taken where it pays with one round more than uniform routing is expected to take.

    Args:
      parallel: the mesh; its `exchange` forces one.
      rows: of one data shard.
      top_k: experts of a row.
      held: experts of a chip.
      width: of a row.
      expert_width: intermediate width of an expert.
      activation_bytes: of the activation dtype.
      quantized: rows travel as E4M3 codes with their scales.
    """
    probability = chance(held, held * parallel.chips, top_k)
    places = places_for(rows, probability)
    rounds = rounds_for(rows, probability, places, parallel.chips * parallel.data)
    row = (width + width // 32 if quantized else width * activation_bytes) + ROUTING_BYTES * top_k + SUM_BYTES * width
    others = parallel.data - 1
    gather = float(others * rows * (row + 1))
    ragged = others * places * row + 2 * 4 * (1 - 1 / parallel.chips)
    # Matrices of FP4 with a scale of one byte for 32 values, read again by another round.
    again = held * 3 * width * expert_width * 17 / 32
    pays = (rounds + 1) * ragged + rounds * again / READ_TO_SENT < gather
    return Exchange(
        ragged=pays if parallel.exchange == "auto" else parallel.exchange == "ragged",
        rows=rows,
        places=places,
        expected=rows * probability,
        rounds=rounds,
        gather_bytes=gather,
        ragged_bytes=ragged,
    )


def exchange_of(
    text: TextConfig, parallel: Parallel, rows: int, *, activation_bytes: int = 2, quantized: bool = True
) -> Exchange:
    """`decide` for a model whose experts lie over both axes of a mesh."""
    return decide(
        parallel,
        rows,
        top_k=text.num_experts_per_tok,
        held=text.n_routed_experts // parallel.expert_shards,
        width=text.hidden_size,
        expert_width=text.moe_intermediate_size,
        activation_bytes=activation_bytes,
        quantized=quantized,
    )
