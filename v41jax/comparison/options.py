"""What may vary between the two sides of a comparison, and its text form on the command line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp

from v41jax.full_forward import split_rows
from v41jax.layers.collectives import ONE_CHIP, Parallel
from v41jax.precision import Precision

KINDS = ("reference", "xla", "pallas", "npz")
REPLAYS = ("decoder", "encoder", "both")
DTYPES = ("float32", "bfloat16")
PARTS = ("activations", "index", "main", "window")
"""What activation quantization rounds: inputs of matrix products, index keys and queries, compressed rows, windows."""


@dataclasses.dataclass(frozen=True)
class Options:
    """One side of a comparison.

    Attributes:
      kind: one of `KINDS`.
      text: as given, for reports.
      precision: rounding choices.
      packed: FP4 main rows and FP8 window rows.
      index_format: of the index plane, "fp4" or "fp8".
      only: the reference quantizes these of `PARTS` and leaves the others alone; None is all.
      weights: form of the weights; kernels read them as stored where nothing is said.
      chunks: rows of each forward of the free-running logits; None is one.
      parallel: mesh of the free-running logits; no layer is observed on one.
      replay: bounded replay mode of the free-running logits, one of `REPLAYS`, or None.
      model: another checkpoint than the comparison's.
      file, prefix: of a recording.
    """

    kind: str
    text: str
    precision: Precision
    packed: bool = False
    index_format: str = "fp4"
    only: tuple[str, ...] | None = None
    weights: str = "dequantized"
    chunks: tuple[int, ...] | None = None
    parallel: Parallel = ONE_CHIP
    replay: str | None = None
    model: Path | None = None
    file: Path | None = None
    prefix: str | None = None

    @property
    def logits_only(self) -> bool:
        """No layer of this side can be observed."""
        return self.replay is not None or self.parallel != ONE_CHIP

    def stops(self, total: int) -> list[int]:
        """Ends of the forwards of a prompt."""
        stops, position = [], 0
        for length in split_rows(total, self.chunks):
            position += length
            stops.append(position)
        return stops


def parse(text: str, precision: Precision) -> Options:
    """Reads `KIND[:OPTION,...]`.

    Args:
      text: as on the command line.
      precision: where the text says nothing.

    Raises:
      ValueError: with every fault of the text.
    """
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise ValueError(f"{text!r}: a side begins with one of {', '.join(KINDS)}")
    if kind == "npz":
        file, _, prefix = rest.partition("@")
        if not file:
            raise ValueError(f"{text!r} names no file: npz:FILE[@PREFIX]")
        if prefix:
            precision = _precision_of_prefix(prefix, precision)
        return Options(kind, text, precision, file=Path(file), prefix=prefix or None)
    # The kernels of the experts read packed weights and no others.
    values: dict[str, object] = {"weights": "stored" if kind == "pallas" else "dequantized"}
    changes: dict[str, object] = {}
    faults = []

    def one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
        if value not in allowed:
            faults.append(f"{name}={value} must be one of {', '.join(allowed)}")
        return value

    for part in filter(None, rest.split(",")):
        name, _, value = part.partition("=")
        if part in ("quant", "noquant"):
            changes["activation_quantization"] = part == "quant"
        elif part == "packed":
            values["packed"] = True
        elif name == "dtype" and one_of(name, value, DTYPES) in DTYPES:
            changes["activation_dtype"] = jnp.dtype(value)
        elif name == "scores" and one_of(name, value, DTYPES) in DTYPES:
            changes["index_score_dtype"] = jnp.dtype(value)
        elif name == "index":
            values["index_format"] = one_of(name, value, ("fp4", "fp8"))
        elif name == "only":
            parts = tuple(value.split("+"))
            values["only"] = parts
            for unknown in sorted(set(parts) - set(PARTS)):
                faults.append(f"only={unknown} must be of {', '.join(PARTS)}, joined by +")
        elif name == "weights":
            values["weights"] = one_of(name, value, ("stored", "arranged", "dequantized"))
        elif name == "mesh":
            chips, _, experts = value.partition("+")
            if chips.isdecimal() and int(chips) > 0 and experts in ("", "experts"):
                values["parallel"] = Parallel(1, int(chips), "model" if experts else "intermediate")
            else:
                faults.append(f"mesh={value} must be a number of chips, with +experts for whole experts on each")
        elif name == "replay":
            values["replay"] = one_of(name, value, REPLAYS)
        elif name == "model" and value:
            values["model"] = Path(value)
        elif name == "chunks":
            sizes = value.split("+")
            if all(size.isdecimal() and int(size) > 0 for size in sizes):
                values["chunks"] = tuple(int(size) for size in sizes)
            else:
                faults.append(f"chunks={value} must be whole numbers of at least 1 joined by +")
        elif name not in ("dtype", "scores"):
            faults.append(f"unknown option {part!r}")
    precision = dataclasses.replace(precision, **changes)  # type: ignore[arg-type]
    options = Options(kind, text, precision, **values)  # type: ignore[arg-type]
    if options.packed and not precision.activation_quantization:
        faults.append("packed rows hold quantized activations: they need quant")
    if kind == "reference" and (options.packed or options.weights != "dequantized"):
        faults.append("the reference has no packed rows or weight forms")
    if options.parallel != ONE_CHIP and (kind == "reference" or options.replay is not None):
        faults.append("mesh= cuts a whole forward of the runtime: it needs xla or pallas and no replay")
    if options.parallel != ONE_CHIP and options.weights == "arranged":
        faults.append("weights=arranged are for one chip: cut weights=stored by mesh=")
    if options.only is not None and (kind != "reference" or not precision.activation_quantization):
        faults.append("only= says what the reference quantizes: it needs reference and quant")
    if faults:
        raise ValueError(f"{text!r}: " + "; ".join(faults))
    return options


def _precision_of_prefix(prefix: str, precision: Precision) -> Precision:
    mode, _, dtype = prefix.partition(".")
    changes: dict[str, object] = {}
    if mode in ("quant", "noquant"):
        changes["activation_quantization"] = mode == "quant"
    if dtype in DTYPES:
        changes["activation_dtype"] = jnp.dtype(dtype)
    return dataclasses.replace(precision, **changes)  # type: ignore[arg-type]
