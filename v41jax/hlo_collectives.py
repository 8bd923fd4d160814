"""Counts the collectives of a compiled program from its text, loops multiplied out.

What XLA really sends, not what was asked for: an accidental gather of weights or pools shows here and nowhere else.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import NamedTuple

FUSED_SCATTER = "all-reduce-scatter"
"""Prefix of the fusions in which a TPU program writes a reduce-scatter of many rows: an all-reduce and the slice of it,
which one ring runs as a reduce-scatter."""

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")

_WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
_WIDTHS |= {"s64": 8, "u64": 8, "f64": 8, "s4": 1, "u4": 1}

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_OPERATION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)')
_LOOP = re.compile(r"condition=%?([\w.\-]+)")
_LIMIT = re.compile(r"%?([\w.\-]+) = s32\[\][^ ]* constant\((\d+)\)")
_BELOW = re.compile(r"^\s*ROOT .* compare\(([^)]*)\), direction=LT")
_GROUPS = re.compile(r"replica_groups=(\{\{.*?\}\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|mesh\[[^\]]*\] *\{[^}]*\})")
_AXIS = re.compile(r"'([^']+)'=(\d+)")
_TAKEN = re.compile(r"'([^']+)'(?::\(\d+\)(\d+))?")


class Collective(NamedTuple):
    """Equal collectives of a program.

    Attributes:
      kind: one of `KINDS`.
      bytes: on one chip, what a gather ends with or a reduction starts from; of all arrays that are sent together.
      group: chips that take part together.
      count: how often a run of the program does it. A loop runs as often as the compiler says, or up to the constant
        that its condition compares a counter from 0 with; one of unknown length counts once.
    """

    kind: str
    bytes: int
    group: int
    count: int


def count_collectives(text: str) -> list[Collective]:
    """The collectives of a program in the form of `Compiled.as_text`, most bytes first.

    Of a conditional's branches the one that sends most is counted.
    """
    computations, entry = _computations(text)
    total = _walk(entry, computations, {})
    found = [Collective(*key, count) for key, count in total.items()]
    return sorted(found, key=lambda one: (-one.bytes * one.count, one))


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    computations: dict[str, list[str]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if not line.startswith(" "):
            match = _COMPUTATION.match(line)
            current = match.group(2) if match else None
            if match:
                computations[match.group(2)] = []
                entry = match.group(2) if match.group(1) else entry
        elif current is not None:
            computations[current].append(line)
    return computations, entry


def _walk(name: str, computations: dict[str, list[str]], known: dict[str, Counter]) -> Counter:
    if name in known:
        return known[name]
    total: Counter = Counter()
    for line in computations.get(name, ()):
        match = _OPERATION.match(line)
        if match is None:
            continue
        _, result, operation, rest = match.groups()
        kind = operation.removesuffix("-start")
        if kind in KINDS:
            group = _group(rest)
            sizes = [_bytes(*array) for array in _ARRAY.findall(result)]
            if operation.endswith("-start") and kind != "all-reduce":
                sizes = sizes[len(sizes) // 2 :]  # an asynchronous start holds its operands too, before its results
            if name.startswith(FUSED_SCATTER) and kind == "all-reduce":
                total["reduce-scatter", sum(sizes), group] += 1
                continue
            # A reduce-scatter's result is a part of what it started from.
            total[kind, sum(sizes) * (group if kind == "reduce-scatter" else 1), group] += 1
        elif operation == "conditional":
            branches = _BRANCHES.search(rest)
            names = re.findall(r"[\w.\-]+", branches.group(1)) if branches else _CALLED.findall(rest)
            walked = [_walk(branch, computations, known) for branch in names]
            total += max(walked, key=lambda part: sum(key[1] * count for key, count in part.items()), default=Counter())
        else:
            trips = 1
            if operation == "while":
                trips = _trips(rest, computations)
            for called in _CALLED.findall(rest):
                for key, count in _walk(called, computations, known).items():
                    total[key] += trips * count
    known[name] = total
    return total


def _trips(rest: str, computations: dict[str, list[str]]) -> int:
    """Runs of a loop's body; `rest` is what follows `while(`. A TPU program does not say it."""
    found = _TRIPS.search(rest)
    if found:
        return int(found.group(1))
    condition = _LOOP.search(rest)
    lines = computations.get(condition.group(1), []) if condition else []
    limits = {match.group(1): int(match.group(2)) for match in map(_LIMIT.search, lines) if match}
    for match in filter(None, map(_BELOW.match, lines)):
        compared = re.findall(r"%?([\w.\-]+)(?:, |$)", match.group(1))
        return max(1, limits.get(compared[-1], 1)) if compared else 1
    return 1


def _bytes(dtype: str, dimensions: str) -> int:
    width = 1 if dtype.startswith("f8") else _WIDTHS.get(dtype, 0)
    for size in filter(None, dimensions.split(",")):
        width *= int(size)
    return width


def _group(rest: str) -> int:
    match = _GROUPS.search(rest)
    if match is None:
        return 0
    groups = match.group(1)
    if groups.startswith("mesh"):
        axes, _, taken = groups.partition("]")
        sizes = {name: int(size) for name, size in _AXIS.findall(axes)}
        return math.prod(int(part) if part else sizes[name] for name, part in _TAKEN.findall(taken))
    if groups.startswith("{{"):
        return groups[2:].split("}")[0].count(",") + 1
    return int(groups[1:].split("]")[0].split(",")[-1])
