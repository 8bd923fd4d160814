"""What a configuration amounts to: its layers, and tensors, bytes and parameters by dtype, group and scope."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from checkpoints.schema import group_of, scope_of, tensor_schema
from v41jax.config import CandidateRole, LayerTopology, ModelConfig


def describe(config: ModelConfig, names: Iterable[str] | None = None) -> dict[str, Any]:
    """A summary ready for JSON.

    Args:
      config: what to describe.
      names: count these tensors of the schema only; default all.

    Returns:
      `layers` (one object each), `totals`, and `by_dtype`, `by_group`, `by_scope`: each row has `tensors`, `bytes`,
      `parameters`. Scales count as bytes and not as parameters.
    """
    schema = tensor_schema(config)
    if names is not None:
        kept = set(names)
        schema = {name: spec for name, spec in schema.items() if name in kept}
    total = _Counts()
    tables: dict[str, dict[str, _Counts]] = {"by_dtype": {}, "by_group": {}, "by_scope": {}}
    for name, spec in schema.items():
        keys = {"by_dtype": spec.dtype, "by_group": group_of(name, spec), "by_scope": scope_of(name)}
        for counts in (total, *(tables[table].setdefault(key, _Counts()) for table, key in keys.items())):
            counts.tensors += 1
            counts.nbytes += spec.nbytes
            counts.parameters += spec.parameters
    return {
        "layers": [_layer(config, layer) for layer in config.layers],
        "draft_layers": config.text.num_nextn_predict_layers,
        "totals": total.row(),
        **{
            table: {key: counts.row() for key, counts in sorted(rows.items(), key=lambda item: -item[1].nbytes)}
            for table, rows in tables.items()
        },
    }


class _Counts:
    def __init__(self) -> None:
        self.tensors = self.nbytes = self.parameters = 0

    def row(self) -> dict[str, int]:
        return {"tensors": self.tensors, "bytes": self.nbytes, "parameters": self.parameters}


def _layer(config: ModelConfig, layer: LayerTopology) -> dict[str, Any]:
    text = config.text
    return {
        "layer": layer.index,
        "mode": layer.mode.value,
        "ratio": layer.ratio,
        "kv_owner": layer.kv_owner,
        "topk_owner": layer.topk_owner,
        "candidates": None if layer.candidates is CandidateRole.NONE else layer.candidates.value,
        "engram_rows": None if layer.engram is None else text.engram_num_embeddings[layer.engram],
        "rope": "yarn" if layer.ratio else "plain",
        "rope_theta": text.compress_rope_theta if layer.ratio else text.rope_theta,
    }
