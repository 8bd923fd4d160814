"""Budgets of a comparison: a file of limits, and which measurements are past them.

```toml
[end]                  # of the whole run: logits_mean, logits_max, max_abs, kl_mean, kl_max, nll_change at most;
kl_mean = 1e-3         # top1, cosine at least
top1 = 0.99
[operations.default]   # of every operation: relative_l2, worst_row, max_abs, ulps_max at most; cosine, overlap at least
relative_l2 = 1e-4
[operations.topk]
overlap = 1.0
[departures]
count = 0              # layers with a departing operation, at most
```
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from v41jax.comparison.bisect import Bisection
from v41jax.comparison.metrics import EndDistance
from v41jax.comparison.operations import BY_NAME

AT_LEAST = frozenset({"top1", "cosine", "overlap"})
END = frozenset({"logits_mean", "logits_max", "max_abs", "cosine", "kl_mean", "kl_max", "top1", "nll_change"})
OPERATION = frozenset({"relative_l2", "worst_row", "max_abs", "ulps_max", "cosine", "overlap", "rows_differing"})


@dataclasses.dataclass(frozen=True)
class Budgets:
    """Limits by name of the measurement.

    Attributes:
      end: of the logits.
      operations: by operation, or "default" for those without their own.
      departures: layers that may have a departing operation; None is any number.
    """

    end: Mapping[str, float] = dataclasses.field(default_factory=dict)
    operations: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    departures: int | None = None


class BudgetError(ValueError):
    """A budgets file with malformed entries; `faults` holds one line each."""

    def __init__(self, faults: list[str]):
        self.faults = tuple(faults)
        super().__init__("; ".join(faults))


def read_budgets(path: Path) -> Budgets:
    """Reads a `.toml` or `.json` file.

    Raises:
      BudgetError: with every unknown name and every limit that is no number.
    """
    text = path.read_text(encoding="utf-8")
    try:
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise BudgetError([f"{path}: {error}"]) from None
    return budgets_of(data, str(path))


def budgets_of(data: Any, where: str) -> Budgets:
    """Budgets from a file's contents; `where` names it in errors."""
    faults: list[str] = []

    def limits(values: Any, known: frozenset[str], section: str) -> dict[str, float]:
        result: dict[str, float] = {}
        for name, value in values.items() if isinstance(values, dict) else ():
            if name not in known:
                faults.append(f"{where}: [{section}] {name} is not one of {', '.join(sorted(known))}")
            elif isinstance(value, bool) or not isinstance(value, int | float):
                faults.append(f"{where}: [{section}] {name} is {value!r}, must be a number")
            else:
                result[name] = float(value)
        return result

    if not isinstance(data, dict):
        raise BudgetError([f"{where}: must hold sections"])
    for section in set(data) - {"end", "operations", "departures"}:
        faults.append(f"{where}: unknown section {section}; known are departures, end, operations")
    end = limits(data.get("end", {}), END, "end")
    operations = {}
    for name, values in data.get("operations", {}).items():
        if name != "default" and name not in BY_NAME:
            faults.append(f"{where}: no operation {name!r}; known are default, {', '.join(BY_NAME)}")
        operations[name] = limits(values, OPERATION, f"operations.{name}")
    count = limits(data.get("departures", {}), frozenset({"count"}), "departures").get("count")
    if faults:
        raise BudgetError(faults)
    return Budgets(end, operations, None if count is None else int(count))


def past(budgets: Budgets, end: EndDistance | None, bisection: Bisection | None) -> list[str]:
    """One line for every measurement past its budget."""
    lines = []
    if end is not None:
        for name, limit in budgets.end.items():
            value = abs(end.nll_change) if name == "nll_change" else float(getattr(end, name))
            if _is_past(name, value, limit):
                lines.append(_line("logits", name, value, limit))
    if bisection is None:
        return lines
    for item in bisection.comparisons:
        limits = budgets.operations.get(item.operation, budgets.operations.get("default", {}))
        for name, limit in limits.items():
            for measured in (item.values, item.sets):
                value = getattr(measured, name, None)
                if value is not None and _is_past(name, value, limit):
                    lines.append(_line(f"layer {item.layer} {item.operation}", name, value, limit))
    count = len(bisection.departures)
    if budgets.departures is not None and count > budgets.departures:
        lines.append(f"{count} layers depart, the budget is {budgets.departures}")
    return lines


def _is_past(name: str, value: float, limit: float) -> bool:
    # Written so that NaN is past every budget.
    return not (value >= limit if name in AT_LEAST else value <= limit)


def _line(where: str, name: str, value: float, limit: float) -> str:
    return f"{where}: {name} {value:.3g}, the budget is {'at least' if name in AT_LEAST else 'at most'} {limit:.3g}"
