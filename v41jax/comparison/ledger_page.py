"""The ledger's budgets, its table in a page, and the command that measures, writes and judges.

```toml
[decoder_replay]                 # key of a row of `ledger.ENTRIES`
reason = "why so much and no more"
logits_mean = 1.5e-3             # as in the [end] section of other budgets, or tokens_differing for drafts
```
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import Progress

from v41jax.comparison.budgets import BudgetError, Budgets, budgets_of, past
from v41jax.comparison.ledger import BY_KEY, DRAFTS, ENTRIES, Measured, measure
from v41jax.provenance import provenance

BEGIN, END = "<!-- ledger: begin -->", "<!-- ledger: end -->"


@dataclasses.dataclass(frozen=True)
class RowBudget:
    """Limits of one row.

    Attributes:
      reason: for people.
      end: of the logits.
      tokens_differing: of drafts.
    """

    reason: str
    end: Budgets
    tokens_differing: int | None = None


def read_ledger_budgets(path: Path) -> dict[str, RowBudget]:
    """Budgets by key of the row.

    Raises:
      BudgetError: with every row that is unknown or lacks a reason, and every unknown or malformed limit.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise BudgetError([f"{path}: {error}"]) from None
    faults: list[str] = []
    result = {}
    for key, row in data.items():
        if key not in BY_KEY or not isinstance(row, dict):
            faults.append(f"{path}: no row {key!r}; known are {', '.join(BY_KEY)}")
            continue
        limits = dict(row)
        reason = limits.pop("reason", None)
        differing = limits.pop("tokens_differing", None)
        if not isinstance(reason, str) or not reason:
            faults.append(f"{path}: [{key}] has no reason")
        if differing is not None and (isinstance(differing, bool) or not isinstance(differing, int)):
            faults.append(f"{path}: [{key}] tokens_differing is {differing!r}, must be a whole number")
        counts = BY_KEY[key].right == DRAFTS
        idle = sorted(limits) if counts else [] if differing is None else ["tokens_differing"]
        if idle:
            faults.append(
                f"{path}: [{key}] {', '.join(idle)} cannot be judged: the row measures "
                + ("tokens" if counts else "logits")
            )
        try:
            result[key] = RowBudget(str(reason), budgets_of({"end": limits}, f"{path} [{key}]"), differing)
        except BudgetError as error:
            faults += error.faults
    if faults:
        raise BudgetError(faults)
    return result


def past_ledger(measured: Sequence[Measured], budgets: Mapping[str, RowBudget]) -> list[str]:
    """One line a measurement past its budget; a row without one has no limit."""
    lines = []
    for item in measured:
        budget = budgets.get(item.entry.key)
        if budget is None:
            continue
        lines += [f"{item.entry.key}: {line}" for line in past(budget.end, item.end, None)]
        if budget.tokens_differing is not None and item.tokens_differing > budget.tokens_differing:
            lines.append(
                f"{item.entry.key}: {item.tokens_differing} of {item.tokens} tokens differ, the budget is "
                f"{budget.tokens_differing}"
            )
    return lines


def table(measured: Sequence[Measured], budgets: Mapping[str, RowBudget]) -> str:
    """The rows as Markdown."""
    lines = [
        "| approximation | logits, relative L2 | KL, nats | same best token | NLL, nats a token | rows |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for item in measured:
        end, budget = item.end, budgets.get(item.entry.key)
        limits = {} if budget is None else budget.end.end
        if end is None:
            most = "" if budget is None or budget.tokens_differing is None else f" (≤ {budget.tokens_differing})"
            lines.append(
                f"| {item.entry.name} | {item.tokens_differing} of {item.tokens} tokens differ{most} | | | | |"
            )
            continue
        cells = [
            f"{end.logits_mean:.1e}{_limit(limits, 'logits_mean', '≤')}",
            f"{end.kl_mean:.1e}{_limit(limits, 'kl_mean', '≤')}",
            f"{end.top1:.3f}{_limit(limits, 'top1', '≥')}",
            f"{end.nll_change:+.4f} ± {item.nll_error:.4f}{_limit(limits, 'nll_change', '≤')}",
            str(end.rows),
        ]
        lines.append(f"| {item.entry.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _limit(limits: Mapping[str, float], name: str, sign: str) -> str:
    return f" ({sign} {limits[name]:g})" if name in limits else ""


def with_table(page: str, rows: str) -> str:
    """A page with what is between its markers replaced.

    Raises:
      ValueError: a page without both markers in order.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} ... {END} to write the ledger between")
    return f"{before}{BEGIN}\n\n{rows}\n\n{END}{after}"


def as_json(measured: Sequence[Measured], lines: Sequence[str]) -> dict[str, Any]:
    """Everything that was measured, with its origin."""
    return {"origin": provenance(), "rows": [dataclasses.asdict(item) for item in measured], "past_budget": [*lines]}


def run(
    model: Path,
    prompts: Sequence[NDArray[np.int32]],
    *,
    continuation: int,
    only: str | None,
    budgets: Path | None,
    page: Path | None,
    json_file: Path | None,
) -> bool:
    """Measures, prints, writes, and says whether every row is within its budget.

    Args:
      model: checkpoint directory.
      prompts: token ids.
      continuation: see `ledger.measure`.
      only: keys of rows joined by commas; None is all.
      budgets: file of limits.
      page: Markdown with the markers, which is rewritten.
      json_file: for the measurements.

    Raises:
      ValueError: unknown rows, a page without markers, or a part of the rows for a page.
    """
    entries = ENTRIES
    if only is not None:
        unknown = sorted(set(only.split(",")) - set(BY_KEY))
        if unknown:
            raise ValueError(f"--only: no row {', '.join(unknown)}; known are {', '.join(BY_KEY)}")
        if page is not None:
            raise ValueError("--page holds every row of the ledger: give it without --only")
        entries = tuple(BY_KEY[key] for key in only.split(","))
    limits = {} if budgets is None else read_ledger_budgets(budgets)
    if page is not None:
        with_table(page.read_text(encoding="utf-8"), "")
    bar = Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    with bar:
        task = bar.add_task("measuring", total=len(entries))
        measured = measure(
            model, prompts, continuation=continuation, entries=entries, progress=lambda: bar.advance(task)
        )
    rows, lines = table(measured, limits), past_ledger(measured, limits)
    Console(width=None if sys.stdout.isatty() else 150).print(Markdown(rows))
    for line in lines:
        print(f"past budget: {line}")
    if page is not None:
        page.write_text(with_table(page.read_text(encoding="utf-8"), rows), encoding="utf-8")
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(measured, lines), indent=1) + "\n", encoding="utf-8")
    return not lines
