"""The operations of a layer in the order in which they run, by the name of the tensor each makes.

Both sides of a comparison record tensors under these names; the first name in this order on which they differ is the
operation that departs.
"""

from __future__ import annotations

import dataclasses
import enum

import numpy as np
from numpy.typing import NDArray

from v41jax import quantization_numpy as codecs

EMBEDDING = -1
"""Layer number under which the embedding is reported."""


class Kind(enum.Enum):
    """How a tensor is compared.

    ROWS: values, first axis the rows of the prompt. ENTRIES: values, first axis the compressed entries of an owner.
    SCORES: [rows, entries], -inf where an entry may not be chosen. IDS: sets of ids a row, -1 padded. EXACT: ids whose
    order counts.
    """

    ROWS = "rows"
    ENTRIES = "entries"
    SCORES = "scores"
    IDS = "ids"
    EXACT = "exact"


@dataclasses.dataclass(frozen=True)
class Operation:
    """One recorded tensor.

    Attributes:
      name: of the tensor, as in the reference's `LayerRecord` where it has it.
      kind: see `Kind`.
      what: the computation that makes it from the tensors before it.
      quantizer: format its readers see it in: "q8", "q4n", "index_key", "index_query"; None for none.
    """

    name: str
    kind: Kind
    what: str
    quantizer: str | None = None


LAYER: tuple[Operation, ...] = (
    Operation("engram_row_ids", Kind.EXACT, "Engram hash of the n-grams"),
    Operation("engram_rows", Kind.ROWS, "Engram table rows, dequantized", "q8"),
    Operation("engram_gates", Kind.ROWS, "Engram keys and gates"),
    Operation("mixed_streams", Kind.ROWS, "Engram update of the streams"),
    Operation("attention_input", Kind.ROWS, "collapse of the streams and attention norm", "q8"),
    Operation("compressed_kv", Kind.ENTRIES, "compressor: projections, pooling, norm, rotation", "q4n"),
    Operation("index_key", Kind.ENTRIES, "index key: projection, norm, rotation", "index_key"),
    Operation("compressed", Kind.ENTRIES, "compressed rows as later readers find them: quantizer and page write"),
    Operation("index_keys", Kind.ENTRIES, "index keys as later readers find them: quantizer and page write"),
    Operation("window_kv", Kind.ROWS, "window keys: projection, norm, rotation", "q8"),
    Operation("window_rows", Kind.ROWS, "window keys as attention reads them"),
    Operation("low_rank_query", Kind.ROWS, "query latent: wq_a and norm", "q8"),
    Operation("index_query", Kind.ROWS, "index queries: projection and rotation", "index_query"),
    Operation("index_head_weights", Kind.ROWS, "index head weights"),
    Operation("index_scores", Kind.SCORES, "index scores"),
    Operation("candidate_blocks", Kind.IDS, "selection of candidate blocks"),
    Operation("topk", Kind.IDS, "selection of entries"),
    Operation("query", Kind.ROWS, "queries: wq_b and rotation"),
    Operation("attended", Kind.ROWS, "attention over window and selection, inverse rotation"),
    Operation("grouped_output", Kind.ROWS, "grouped output projection wo_a", "q8"),
    Operation("attention_output", Kind.ROWS, "output projection wo_b"),
    Operation("attention_pre_mix", Kind.ROWS, "hyper-connection mixes of attention: pre"),
    Operation("attention_post", Kind.ROWS, "hyper-connection mixes of attention: post"),
    Operation("attention_combination", Kind.ROWS, "hyper-connection mixes of attention: combination (Sinkhorn)"),
    Operation("attention_streams", Kind.ROWS, "expand of the attention output"),
    Operation("ffn_input", Kind.ROWS, "collapse of the streams and FFN norm", "q8"),
    Operation("router_logits", Kind.ROWS, "router logits"),
    Operation("router_choices", Kind.IDS, "choice of experts"),
    Operation("router_weights", Kind.ROWS, "expert weights"),
    Operation("shared_hidden", Kind.ROWS, "shared expert: w1, w3, clamp and SwiGLU", "q8"),
    Operation("shared_output", Kind.ROWS, "shared expert: w2"),
    Operation("routed_output", Kind.ROWS, "routed experts and their weighted sum"),
    Operation("ffn_output", Kind.ROWS, "sum of routed and shared experts"),
    Operation("pre_mix", Kind.ROWS, "hyper-connection mixes of the FFN: pre"),
    Operation("ffn_post", Kind.ROWS, "hyper-connection mixes of the FFN: post"),
    Operation("ffn_combination", Kind.ROWS, "hyper-connection mixes of the FFN: combination (Sinkhorn)"),
    Operation("streams", Kind.ROWS, "expand of the FFN output"),
)

EMBED = Operation("embedding", Kind.ROWS, "embedding copied to the streams")
HEAD: tuple[Operation, ...] = (
    Operation("hidden", Kind.ROWS, "final collapse and norm"),
    Operation("logits", Kind.ROWS, "output head"),
)

BY_NAME = {operation.name: operation for operation in (EMBED, *LAYER, *HEAD)}


def quantized(values: NDArray, quantizer: str, index_format: str) -> NDArray[np.float32]:
    """Values as the readers of an operation's tensor see them, float32 of the same shape.

    Args:
      values: [..., n], before the quantizer.
      quantizer: of the `Operation`.
      index_format: "fp4" or "fp8", of the index plane.
    """
    x = np.asarray(values, np.float32)
    if quantizer == "q8":
        return codecs.fake_q8(x)
    if quantizer == "q4n":
        return codecs.fake_q4n(x)
    if index_format == "fp4":
        return codecs.fake_q4m(x)
    codes, scale = (codecs.quantize_index_key_fp8 if quantizer == "index_key" else codecs.quantize_index_query_fp8)(x)
    return codecs.decode_e4m3(codes) * scale[..., None]
