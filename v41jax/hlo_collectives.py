"""Counts the collectives of a compiled program from its text, loops multiplied out.

What XLA really sends, not what was asked for: an accidental gather of weights or pools shows here and nowhere else.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")

_WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
_WIDTHS |= {"s64": 8, "u64": 8, "f64": 8, "s4": 1, "u4": 1}

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_OPERATION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)')
_GROUPS = re.compile(r"replica_groups=(\{\{.*?\}\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)")


class Collective(NamedTuple):
    """Equal collectives of a program.

    Attributes:
      kind: one of `KINDS`.
      bytes: on one chip, what a gather ends with or a reduction starts from; of all arrays that are sent together.
      group: chips that take part together.
      count: how often a run of the program does it; loops of unknown length count once.
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
                found = _TRIPS.search(rest)
                trips = int(found.group(1)) if found else 1
            for called in _CALLED.findall(rest):
                for key, count in _walk(called, computations, known).items():
                    total[key] += trips * count
    known[name] = total
    return total


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
    if groups.startswith("{{"):
        return groups[2:].split("}")[0].count(",") + 1
    return int(groups[1:].split("]")[0].split(",")[-1])
