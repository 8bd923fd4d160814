"""A comparison as terminal tables and as JSON."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from rich.console import Console
from rich.table import Table

from v41jax.comparison.bisect import Comparison
from v41jax.comparison.operations import BY_NAME, EMBEDDING
from v41jax.comparison.run import Result

_FLIPS_SHOWN = 12


def as_json(result: Result, past_budget: list[str]) -> dict[str, Any]:
    """Everything a comparison measured; numbers that are not finite are None."""
    end = None
    if result.end is not None:
        end = {**dataclasses.asdict(result.end), "nll_change": result.end.nll_change}
    first = result.first
    return _finite(
        {
            "left": result.left.text,
            "right": result.right.text,
            "mode": result.mode,
            "prompt_lengths": result.prompts,
            "end": end,
            "first_departure": None if first is None else dataclasses.asdict(first),
            "departures": [
                [dataclasses.asdict(departure) for departure in bisection.departures] for bisection in result.layers
            ],
            "operations": [dataclasses.asdict(item) for item in result.worst()],
            "flips": [dataclasses.asdict(flip) for flip in result.flips],
            "logit_rows": [rows.tolist() for rows in result.rows],
            "past_budget": past_budget,
        }
    )


def print_report(result: Result, console: Console, past_budget: list[str]) -> None:
    """Tables for a terminal."""
    if result.layers:
        console.print(_operations(result))
        console.print(_selections(result))
    if result.end is not None:
        console.print(_end(result))
    if result.layers:
        console.print(conclusion(result), highlight=False)
        flips = result.flips
        for flip in flips[:_FLIPS_SHOWN]:
            console.print(
                f"  flip: layer {flip.layer} {flip.operation}{list(flip.index)}, {flip.left:.7g} and {flip.right:.7g}",
                highlight=False,
            )
        if len(flips) > _FLIPS_SHOWN:
            console.print(f"  ... {len(flips) - _FLIPS_SHOWN} more in the JSON report", highlight=False)
    for line in past_budget:
        console.print(f"past budget: {line}", highlight=False, style="red")


def conclusion(result: Result) -> str:
    """One sentence: where the two sides part."""
    flips = len(result.flips)
    counted = f"{flips} rounding flips" if flips != 1 else "1 rounding flip"
    first = result.first
    if first is None:
        return f"no layer departs; {counted} located"
    rows = ", ".join(map(str, first.rows[:8])) + (", ..." if len(first.rows) > 8 else "")
    return (
        f"first departure: {place(first.layer, result)}, {first.operation} ({first.what}), "
        f"rows {rows}, by {first.error:.2e}; {counted} located"
    )


def place(layer: int, result: Result) -> str:
    """Name of a layer number, embedding and head included."""
    if layer == EMBEDDING:
        return "embedding"
    last = max((item.layer for item in result.worst()), default=0)
    return (
        "head"
        if layer == last and any(item.layer == layer and item.operation == "logits" for item in result.worst())
        else f"layer {layer}"
    )


def by_operation(result: Result) -> dict[str, list[Comparison]]:
    """Comparisons of each operation over the layers, operations in the order in which they run."""
    grouped: dict[str, list[Comparison]] = {name: [] for name in BY_NAME}
    for item in result.worst():
        grouped[item.operation].append(item)
    return {name: items for name, items in grouped.items() if items}


def _operations(result: Result) -> Table:
    table = Table(title=f"{result.right.text} against {result.left.text}, {result.mode}: worst layer of each operation")
    table.add_column("operation", no_wrap=True)
    for heading in ("layer", "relative L2", "worst row", "max abs", "ulps", "cosine", "flips", "depart"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, items in by_operation(result).items():
        measured = [item for item in items if item.values is not None]
        if not measured:
            continue
        worst = max(measured, key=lambda item: item.values.relative_l2)  # type: ignore[union-attr]
        values = worst.values
        assert values is not None
        table.add_row(
            name,
            str(worst.layer),
            f"{values.relative_l2:.1e}",
            f"{values.worst_row:.1e}",
            f"{values.max_abs:.1e}",
            f"{values.ulps_max:.0f}",
            f"{values.cosine:.8f}",
            str(sum(item.flips for item in items)),
            ",".join(str(item.layer) for item in items if item.departed) or "-",
        )
    return table


def _selections(result: Result) -> Table:
    table = Table(title="selections")
    table.add_column("selection", no_wrap=True)
    for heading in ("layer", "overlap", "rows differing", "border margin", "swapped gap"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, items in by_operation(result).items():
        for item in items:
            if item.sets is None:
                continue
            table.add_row(
                name,
                str(item.layer),
                f"{item.sets.overlap:.4%}",
                f"{item.sets.rows_differing} of {item.rows}",
                _number(item.sets.border_margin),
                _number(item.sets.swapped_gap),
            )
    return table


def _end(result: Result) -> Table:
    table = Table(title="logits, free running")
    for heading in ("rows", "relative L2", "worst row", "cosine", "KL", "worst KL", "top-1", "NLL", "change"):
        table.add_column(heading, justify="right", no_wrap=True)
    end = result.end
    assert end is not None
    table.add_row(
        str(end.rows),
        f"{end.logits_mean:.2e}",
        f"{end.logits_max:.2e}",
        f"{end.cosine:.6f}",
        f"{end.kl_mean:.2e}",
        f"{end.kl_max:.2e}",
        f"{end.top1:.2%}",
        f"{end.nll_left:.4f}",
        f"{end.nll_change:+.4f}",
    )
    return table


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1e}"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
