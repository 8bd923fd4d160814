"""The calibration profile of dynamic verification: measured step rates and temperatures, bound to where they hold.

A profile is one JSON object. It names the model, mesh, cache formats, device and versions it was measured with and is
refused anywhere else: step rates and acceptance change with each of them (DSpark specification, "Calibration
profile").
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.index_file import INDEX_NAME
from v41jax.confidence import Blocks, Reliability
from v41jax.model import ModelSetup

VERSION = 2


class ProfileError(ValueError):
    """A profile that must not be used; `faults` holds one line each."""

    def __init__(self, faults: Sequence[str]):
        self.faults = tuple(faults)
        super().__init__("; ".join(self.faults))


@dataclasses.dataclass(frozen=True)
class Identity:
    """Where measurements hold.

    Attributes:
      config_sha256: of the checkpoint's `config.json`.
      index_sha256: of its weight index; hashes of metadata do not cover the bytes of the weights.
      model_type: of the checkpoint.
      mesh: axis sizes, such as `data=2,model=4`.
      layout: identity of the pools, which names every cache format.
      precision: activation dtype and whether activations are quantized.
      weights: form of the weights.
      kernels: implementation of the operations.
      execution: `compiled` or `eager`.
      device: device kind.
      versions: of this package, jax and jaxlib.
    """

    config_sha256: str
    index_sha256: str
    model_type: str
    mesh: str
    layout: str
    precision: str
    weights: str
    kernels: str
    execution: str
    device: str
    versions: str


def running_identity(
    directory: Path,
    setup: ModelSetup,
    *,
    device: str,
    mesh: Mapping[str, int] | None = None,
    weights: str = "stored",
    eager: bool = False,
) -> Identity:
    """Identity of a process that serves a checkpoint.

    Args:
      directory: of the checkpoint.
      setup: what its forward is specialized on.
      device: `device_kind` of the devices.
      mesh: axis sizes; None is one device.
      weights: form of the weights.
      eager: steps run op by op.
    """
    precision = setup.precision
    quantized = "quantized" if precision.activation_quantization else "unquantized"
    axes = {"data": 1, "model": 1} if mesh is None else dict(mesh)
    return Identity(
        config_sha256=_file_hash(directory / "config.json"),
        index_sha256=_file_hash(directory / INDEX_NAME),
        model_type=json.loads((directory / "config.json").read_bytes())["model_type"],
        mesh=",".join(f"{axis}={size}" for axis, size in axes.items()),
        layout=setup.geometry.layout_id,
        precision=f"{np.dtype(precision.activation_dtype).name} {quantized}",
        weights=weights,
        kernels=setup.kernels,
        execution="eager" if eager else "compiled",
        device=device,
        versions=" ".join(f"{name}={_installed(name)}" for name in ("v41jax", "jax", "jaxlib")),
    )


@dataclasses.dataclass(frozen=True)
class Profile:
    """One calibration; valid once built.

    Attributes:
      identity: where it holds.
      draft_width: proposals of a block.
      max_num_seqs: most requests of a step that was measured, on one data shard.
      sps_table: forwards per second; the index is rows of the largest data shard,
        0 .. max_num_seqs * (draft_width + 1).
      sts_temperatures: one per position.
      evidence: hashes of the raw measurements, and the held-out metrics.

    Raises:
      ProfileError: with every broken rule.
    """

    identity: Identity
    draft_width: int
    max_num_seqs: int
    sps_table: tuple[float, ...]
    sts_temperatures: tuple[float, ...]
    evidence: Mapping[str, Any]

    def __post_init__(self) -> None:
        faults = []
        for name in ("draft_width", "max_num_seqs"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                faults.append(f"{name} is {value!r}, must be a positive integer")
        for name in ("sps_table", "sts_temperatures"):
            values = getattr(self, name)
            if not isinstance(values, (list, tuple)) or not all(_is_positive(value) for value in values):
                faults.append(f"{name} must be a list of finite positive numbers")
            else:
                object.__setattr__(self, name, tuple(float(value) for value in values))
        if not isinstance(self.evidence, Mapping):
            faults.append(f"evidence is {type(self.evidence).__name__}, must be an object")
        if not faults:
            rows = self.max_num_seqs * (self.draft_width + 1)
            if len(self.sps_table) != rows + 1:
                faults.append(f"sps_table has {len(self.sps_table)} entries, {rows + 1} cover 0..{rows} rows")
            rising = [row for row in range(1, len(self.sps_table)) if self.sps_table[row] > self.sps_table[row - 1]]
            if rising:
                faults.append(f"sps_table rises at {rising[0]} rows: it must never increase")
            if len(self.sts_temperatures) != self.draft_width:
                faults.append(f"{len(self.sts_temperatures)} temperatures for a draft of width {self.draft_width}")
        if faults:
            raise ProfileError(faults)

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Reads a profile file.

        Raises:
          ProfileError: not a profile of this version.
          OSError: the file cannot be read.
        """
        try:
            root = json.loads(Path(path).read_bytes())
        except (ValueError, RecursionError) as error:
            raise ProfileError([f"{path} is not a JSON file: {error}"]) from None
        if not isinstance(root, dict) or root.get("version") != VERSION:
            found = root.get("version") if isinstance(root, dict) else type(root).__name__
            raise ProfileError([f"{path} is no calibration profile of version {VERSION} (found {found!r})"])
        wanted = {field.name for field in dataclasses.fields(cls)}
        names = {field.name for field in dataclasses.fields(Identity)}
        given = root.get("identity")
        faults = [f"{path} lacks {name}" for name in sorted(wanted - root.keys())]
        faults += [f"{path} has an unknown field {name!r}" for name in sorted(root.keys() - wanted - {"version"})]
        if not isinstance(given, dict) or given.keys() != names:
            faults.append(f"{path}: identity must have exactly the fields {', '.join(sorted(names))}")
        if faults:
            raise ProfileError(faults)
        return cls(identity=Identity(**given), **{name: root[name] for name in wanted - {"identity"}})

    def write(self, path: Path) -> None:
        """Writes the profile as one JSON object."""
        root = {"version": VERSION, **dataclasses.asdict(self), "evidence": dict(self.evidence)}
        Path(path).write_text(json.dumps(root, indent=1, allow_nan=False) + "\n")

    def check(self, identity: Identity, *, draft_width: int, max_num_seqs: int) -> None:
        """Refuses a profile that was not measured with the running process's model, mesh, caches, device and versions.

        `max_num_seqs` is that of one data shard.

        Raises:
          ProfileError: with every difference.
        """
        faults = []
        for field in dataclasses.fields(Identity):
            ours, theirs = getattr(self.identity, field.name), getattr(identity, field.name)
            if ours != theirs:
                faults.append(f"the profile was measured with {field.name} {ours!r}, this process has {theirs!r}")
        if self.draft_width != draft_width:
            faults.append(f"the profile is for {self.draft_width} proposals, this engine drafts {draft_width}")
        if self.max_num_seqs < max_num_seqs:
            faults.append(f"the profile covers {self.max_num_seqs} requests, max_num_seqs is {max_num_seqs}")
        if faults:
            raise ProfileError([*faults, "measure a new one"])


def evidence_of(
    blocks: Blocks,
    measured: Mapping[int, float],
    before: Sequence[Reliability],
    after: Sequence[Reliability],
) -> dict[str, Any]:
    """What a profile records of its origin.

    Args:
      blocks: all verified blocks.
      measured: rows -> forwards per second, as measured.
      before, after: held-out reliability without and with the temperatures.
    """
    digest = hashlib.sha256()
    for name in ("confidences", "offered", "accepted", "requests"):
        digest.update(np.ascontiguousarray(getattr(blocks, name)).tobytes())
    rates = json.dumps(sorted(measured.items()))

    def means(report: Sequence[Reliability]) -> dict[str, float | None]:
        names = ("calibration_error", "brier", "negative_log_likelihood")
        values = {name: [getattr(place, name) for place in report if place.blocks] for name in names}
        return {name: float(np.mean(found)) if found else None for name, found in values.items()}

    return {
        "blocks": int(blocks.offered.size),
        "blocks_sha256": digest.hexdigest(),
        "rates_sha256": hashlib.sha256(rates.encode()).hexdigest(),
        "measured_rows": sorted(measured),
        "held_out_before": means(before),
        "held_out_after": means(after),
    }


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "source"
