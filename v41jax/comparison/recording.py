"""What one side of a comparison computed for one prompt, and its file form.

The file is an `.npz`. It holds the names of the golden recordings (`{prefix}.streams`, `.pre_mix`, `.topk{L}`,
`.engram_hash`, `.rec_prompt`, `.logits`) so that tools for those read it, and every other recorded tensor as
`{prefix}.layer{L}.{name}`.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from v41jax.comparison.operations import BY_NAME

_LAYER_KEY = re.compile(r"layer(\d+)\.(\w+)")


@dataclasses.dataclass
class Recording:
    """Tensors of one run over one prompt of `n` tokens.

    Attributes:
      ids: [n] int32.
      layers: by layer, name of the operation -> tensor; a side need not have every name.
      embedding: [n, S, D], or None.
      hidden: [n, D], the normed collapse, or None.
      logits: [rows, V] of the last `rows` positions, or None.
      layer_inputs: (streams [layers, n, S, D], pre-mix [layers, n, S]) that entered each layer, or None.
    """

    ids: NDArray[np.int32]
    layers: list[dict[str, NDArray]]
    embedding: NDArray | None = None
    hidden: NDArray | None = None
    logits: NDArray | None = None
    layer_inputs: tuple[NDArray, NDArray] | None = None

    def last_logits(self, rows: int) -> NDArray:
        """Logits of the last `rows` positions."""
        assert self.logits is not None
        return self.logits[len(self.logits) - rows :]


def write(path: Path, recording: Recording, prefix: str) -> None:
    """Writes a recording; `prefix` is `{mode}.{dtype}`, such as `quant.float32`."""
    arrays: dict[str, NDArray] = {"rec_prompt": recording.ids}
    if recording.logits is not None:
        arrays["logits"] = recording.logits.astype(np.float32)
    if recording.embedding is not None:
        arrays["embedding"] = recording.embedding.astype(np.float32)
    if recording.hidden is not None:
        arrays["hidden"] = recording.hidden.astype(np.float32)
    for whole in ("streams", "pre_mix"):
        parts = [layer[whole] for layer in recording.layers if whole in layer]
        if parts and len(parts) == len(recording.layers):
            arrays[whole] = np.stack(parts).astype(np.float32)
    hashes = [layer["engram_row_ids"] for layer in recording.layers if "engram_row_ids" in layer]
    if hashes:
        arrays["engram_hash"] = np.stack(hashes, axis=1)
    for number, layer in enumerate(recording.layers):
        for name, value in layer.items():
            if name in ("streams", "pre_mix", "engram_row_ids"):
                continue
            # The selection of a source is also that of the layers after it; the source's own name carries it.
            key = f"topk{number}" if name == "topk" and "index_scores" in layer else f"layer{number}.{name}"
            arrays[key] = value.astype(np.float32) if value.dtype.kind == "f" else value
    with open(path, "wb") as file:
        np.savez(file, **{f"{prefix}.{name}": value for name, value in arrays.items()})


def read(path: Path, prefix: str | None, layers: int, engram_layers: tuple[int, ...]) -> Recording:
    """Reads a recording of a model with so many layers.

    Args:
      path: `.npz`.
      prefix: `{mode}.{dtype}`; None takes the only one there is.
      layers: of the model.
      engram_layers: layers whose row ids `engram_hash` holds, in order.

    Raises:
      ValueError: a file without streams or with several prefixes and none asked for, or of another model.
    """
    with np.load(path, allow_pickle=False) as file:
        found = sorted({name.removesuffix(".streams") for name in file.files if name.endswith(".streams")})
        if prefix is None and len(found) == 1:
            prefix = found[0]
        if prefix not in found:
            wanted = "none is named" if prefix is None else f"{prefix!r} is not among them"
            raise ValueError(
                f"{path}: recordings in it are {', '.join(found) or '(none)'}; {wanted}, use npz:FILE@NAME"
            )
        arrays = {name.removeprefix(f"{prefix}."): file[name] for name in file.files if name.startswith(f"{prefix}.")}
    if "rec_prompt" not in arrays:
        raise ValueError(f"{path}: {prefix}.rec_prompt, the prompt of the recording, is missing")
    if len(arrays["streams"]) != layers:
        raise ValueError(f"{path}: streams of {len(arrays['streams'])} layers, the model has {layers}")
    result: list[dict[str, NDArray]] = [{} for _ in range(layers)]
    for number, layer in enumerate(result):
        layer["streams"] = arrays["streams"][number]
        if "pre_mix" in arrays:
            layer["pre_mix"] = arrays["pre_mix"][number]
        if f"topk{number}" in arrays:
            layer["topk"] = arrays[f"topk{number}"]
    if "engram_hash" in arrays:
        for ordinal, number in enumerate(engram_layers):
            result[number]["engram_row_ids"] = arrays["engram_hash"][:, ordinal]
    for name, value in arrays.items():
        match = _LAYER_KEY.fullmatch(name)
        if match and match[2] in BY_NAME and int(match[1]) < layers:
            result[int(match[1])][match[2]] = value
    return Recording(
        arrays["rec_prompt"].astype(np.int32),
        result,
        arrays.get("embedding"),
        arrays.get("hidden"),
        arrays.get("logits"),
    )
