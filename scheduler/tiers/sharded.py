"""`ShardedTiers`: the tiers of an engine whose data shards have pools of their own.

Every shard has its own link between its pages and the one store: names are hashes of content, so what one shard
wrote is found by all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scheduler.tiers.page_tiers import IDLE_WAIT_S, PageTiers


class ShardedTiers:
    """The links of all shards.

    Attributes:
      parts: the link of each shard; they share one store.
    """

    def __init__(self, parts: Sequence[PageTiers]):
        self.parts = tuple(parts)

    def before_forward(self) -> None:
        """As of `PageTiers`."""
        for part in self.parts:
            part.before_forward()

    def after_results(self) -> None:
        """As of `PageTiers`."""
        for part in self.parts:
            part.after_results()

    @property
    def searches(self) -> bool:
        """As of `PageTiers`."""
        return any(part.searches for part in self.parts)

    def wait(self, timeout_s: float = IDLE_WAIT_S) -> None:
        """As of `PageTiers`; wakes up for the first shard that searches."""
        for part in self.parts:
            if part.searches:
                part.wait(timeout_s)
                return

    def statistics(self) -> dict[str, Any]:
        """Totals of the transfers of all shards, and by tier."""
        found = [part.statistics() for part in self.parts]
        transfers = {name: sum(each["transfers"][name] for each in found) for name in found[0]["transfers"]}
        return {"transfers": transfers, "tiers": found[0]["tiers"]}

    def close(self) -> None:
        """Ends every link, then the tiers."""
        for part in self.parts:
            part.stop()
        self.parts[0].store.close()
