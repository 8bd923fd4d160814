"""The registry of kernel benchmarks: every module here gives its cases through `cases(size) -> iterable of Case`."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation at one shape.

    Attributes:
      operation: folder in pallas_kernels, or what a layer does without one.
      shape: the shape in words, unique within the operation.
      bytes_moved: fewest bytes of device memory: each input read once, each output written once.
      flops: floating-point operations the definition asks for, 0 where the bytes always decide.
      make_sets: count -> that many argument tuples of arrays, of fresh random contents, never zeros.
      variants: name -> function of the arguments; "xla" is the definition where it is listed.
      difference: (expected, found) -> a number that is 0 when equal; compares each variant with the first one.
      tolerance: largest difference that counts as right.
      tuning: more variants, run only with `--tune`.
      in_place: positions of arguments that are donated and are exactly what a variant returns.
    """

    operation: str
    shape: str
    bytes_moved: int
    flops: int
    make_sets: Callable[[int], list[tuple]]
    variants: Mapping[str, Callable[..., Any]]
    difference: Callable[[Any, Any], float]
    tolerance: float = 0.0
    tuning: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    in_place: tuple[int, ...] = ()


SIZES = ("smoke", "production")


def all_cases(size: str) -> Iterator[Case]:
    """Cases of every module of this package, by module name; "smoke" sizes finish on a CPU."""
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        yield from importlib.import_module(f"{__name__}.{module.name}").cases(size)
