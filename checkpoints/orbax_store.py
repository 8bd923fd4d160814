"""A released checkpoint as Orbax arrays that restore onto any mesh, each chip reading its own part.

One Orbax checkpoint for every weight of `parameter_leaves` in its stored form, and `manifest.json`, which says of each
what it holds: shape, dtype, SHA-256 and the released tensors it was made of. A weight is in the manifest when it is
whole on disk, so an interrupted conversion goes on where it stopped. The Engram tables stay in the released files.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from jax import lax
from numpy.typing import NDArray

from checkpoints.errors import CheckpointError
from checkpoints.load import Checkpoint
from checkpoints.schema import tensor_schema
from v41jax.config import ModelConfig
from v41jax.parameters import Leaf, Parameters, describe_checkpoint, parameter_leaves
from v41jax.sharding import leaf_names

MANIFEST = "manifest.json"
VERSION = 1
_FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)


def stored_tensors(config: ModelConfig) -> frozenset[str]:
    """Names of the released tensors a conversion holds: the text model without its Engram tables."""
    names = tensor_schema(config, scopes=("text",))
    return frozenset(name for name in names if ".engram.embed." not in name)


def convert(directory: Path, out: Path, progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
    """Writes a released checkpoint as Orbax arrays, or finishes a conversion that was interrupted.

    Memory beyond the files is that of the largest weight.

    Args:
      directory: in the released layout.
      out: to be written; what it holds of the same checkpoint is kept.
      progress: called with the weights done and their number.

    Returns:
      The manifest.

    Raises:
      CheckpointError: the source cannot be opened, `out` holds another checkpoint's conversion, or a tensor would be
        lost or doubled.
    """
    with Checkpoint.open(directory, scopes=("text",)) as checkpoint:
        leaves = _stored_leaves(checkpoint.config, describe_checkpoint(checkpoint))
        faults = coverage_faults(checkpoint.config, leaves)
        if faults:
            raise CheckpointError(faults)
        manifest = _begin(directory, out)
        for done, (name, leaf) in enumerate(leaves.items()):
            if name not in manifest["weights"]:
                manifest["weights"][name] = _write(out / name, leaf, checkpoint)
                _write_manifest(out, manifest)
            if progress is not None:
                progress(done + 1, len(leaves))
    manifest["complete"] = True
    _write_manifest(out, manifest)
    return manifest


def coverage_faults(config: ModelConfig, leaves: dict[str, Leaf]) -> list[str]:
    """Tensors that the weights would lose or hold twice; empty is the proof that neither happens."""
    counts = Counter(name for leaf in leaves.values() for name in leaf.names)
    wanted = stored_tensors(config)
    faults = [f"{name}: in no weight, it would be lost" for name in sorted(wanted - set(counts))]
    faults += [f"{name}: in no schema" for name in sorted(set(counts) - wanted)]
    return faults + [f"{name}: in {count} weights" for name, count in sorted(counts.items()) if count > 1]


def restore(
    directory: Path, *, max_model_len: int, shardings: Parameters | None = None, dtype: Any = ml_dtypes.bfloat16
) -> Parameters:
    """Weights of a conversion in their stored form; RoPE tables are computed.

    Args:
      directory: that `convert` wrote.
      max_model_len: positions the RoPE tables cover.
      shardings: a pytree of shardings like the result, of any mesh; None puts whole arrays on the default device.
      dtype: the activation dtype.

    Raises:
      CheckpointError: an unfinished conversion, or one that does not fit its own config.json.
    """
    manifest = _read_manifest(directory)
    config = ModelConfig.from_file(directory / "config.json")
    if not manifest.get("complete"):
        raise CheckpointError([f"{directory}: the conversion was interrupted: run it again to finish it"])
    schema = manifest["tensors"]

    def describe(name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        shape, kind = schema[name]
        return tuple(shape), np.dtype(getattr(ml_dtypes, kind, kind))

    tree = parameter_leaves(config, describe, max_model_len=max_model_len, form="stored", dtype=dtype)
    names = leaf_names(tree)
    if shardings is None:
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shardings = jax.tree.map(lambda _: device, tree)

    def one(name: str, leaf: Leaf, sharding: jax.sharding.Sharding) -> jax.Array:
        if not leaf.names:
            return jax.make_array_from_callback(
                leaf.shape, sharding, lambda index: leaf.read(_NoTensors(config), index)
            )
        entry = manifest["weights"].get(name)
        found = None if entry is None else (tuple(entry["shape"]), entry["dtype"])
        if found != (leaf.shape, leaf.dtype.name):
            raise CheckpointError([f"{directory}: {name}: {found}, expected {leaf.shape} {leaf.dtype.name}"])
        return _read(directory / name, leaf.dtype, sharding)

    restored: Parameters = jax.tree.map(one, names, tree, shardings)
    return restored


def verify(directory: Path) -> list[str]:
    """Reads every weight and compares it with its checksum; one line for every fault."""
    manifest = _read_manifest(directory)
    faults = [] if manifest.get("complete") else [f"{directory}: the conversion was interrupted"]
    for name, entry in manifest["weights"].items():
        try:
            value = ocp.PyTreeCheckpointer().restore(directory.absolute() / name)["value"]
        except Exception as error:  # whatever Orbax finds wrong with its files
            faults.append(f"{directory / name}: cannot be read: {' '.join(str(error).split())[:200]}")
            continue
        if _checksum(np.asarray(value)) != entry["sha256"]:
            faults.append(f"{directory / name}: its bytes are not those that were written")
    return faults


class _NoTensors:
    """The source of computed leaves, which read no tensor."""

    def __init__(self, config: ModelConfig):
        self.config = config

    def tensor(self, name: str) -> NDArray[Any]:
        raise KeyError(name)


def _stored_leaves(config: ModelConfig, describe: Any) -> dict[str, Leaf]:
    tree = parameter_leaves(config, describe, max_model_len=1, form="stored", dtype=ml_dtypes.bfloat16)
    names = jax.tree.leaves(leaf_names(tree))
    return {name: leaf for name, leaf in zip(names, jax.tree.leaves(tree), strict=True) if leaf.names}


def _begin(directory: Path, out: Path) -> dict[str, Any]:
    source = hashlib.sha256((directory / "config.json").read_bytes())
    source.update((directory / "model.safetensors.index.json").read_bytes())
    identity = source.hexdigest()
    if (out / MANIFEST).is_file():
        manifest = _read_manifest(out)
        if manifest["source"] != identity:
            raise CheckpointError([f"{out}: holds the conversion of another checkpoint: choose an empty directory"])
        return manifest
    out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(directory / "config.json", out / "config.json")
    with Checkpoint.open(directory, scopes=("text",)) as checkpoint:
        tensors = {
            name: [list(checkpoint.tensor(name).shape), checkpoint.tensor(name).dtype.name]
            for name in sorted(stored_tensors(checkpoint.config))
        }
    return {"version": VERSION, "source": identity, "complete": False, "tensors": tensors, "weights": {}}


def _write(path: Path, leaf: Leaf, checkpoint: Checkpoint) -> dict[str, Any]:
    value = leaf.read(checkpoint)
    stored = value.view(np.uint8) if value.dtype == _FLOAT8 else value
    if path.exists():
        shutil.rmtree(path)  # left by a conversion that was interrupted here
    ocp.PyTreeCheckpointer().save(path.absolute(), {"value": stored})
    return {
        "shape": list(leaf.shape),
        "dtype": leaf.dtype.name,
        "sha256": _checksum(stored),
        "tensors": len(leaf.names),
    }


def _read(path: Path, dtype: np.dtype[Any], sharding: jax.sharding.Sharding) -> jax.Array:
    arguments = {"value": ocp.ArrayRestoreArgs(sharding=sharding)}
    value: jax.Array = ocp.PyTreeCheckpointer().restore(path.absolute(), restore_args=arguments)["value"]
    if dtype == _FLOAT8:
        cast = jax.jit(lambda codes: lax.bitcast_convert_type(codes, _FLOAT8), out_shardings=sharding)
        value = cast(value)
    return value


def _checksum(value: NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(value).view(np.uint8).reshape(-1).data).hexdigest()


def _read_manifest(directory: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((directory / MANIFEST).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError([f"{directory / MANIFEST}: cannot be read: {error}"]) from None
    if manifest.get("version") != VERSION:
        raise CheckpointError([f"{directory / MANIFEST}: version {manifest.get('version')!r}, expected {VERSION}"])
    return manifest


def _write_manifest(out: Path, manifest: dict[str, Any]) -> None:
    temporary = out / f"{MANIFEST}.new"
    with temporary.open("w") as file:
        json.dump(manifest, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(out / MANIFEST)
