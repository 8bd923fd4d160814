"""The few facts about a model that the host side needs, without importing model code."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

SUPPORTED_ARCHITECTURE = "DeepseekV41ForCausalLM"


@dataclasses.dataclass(frozen=True)
class ModelView:
    """Integers of a model configuration that pools, planning and validation depend on.

    Attributes:
      layers: backbone layers.
      owners: (layer, ratio) of the layers that own compressed rows, ascending.
      layer_ratios: compression ratio of each backbone and draft layer.
      window_size: sliding window (`W`).
      head_dim: main latent width.
      index_dim: index key width.
      index_topk: selected compressed rows per query.
      history_size: Engram ids a cursor keeps (`Hh`).
      engram_layers: layers with an Engram.
      image_token_id: id that image positions carry.
      eos_token_ids: ids that end a generation.
      max_position: longest sequence the model supports, in tokens.
      num_attention_heads, index_n_heads, o_groups, moe_intermediate_size, n_routed_experts: what sharding divides.
      draft_layers, draft_tokens: layers and block size of the speculative draft model.
      architecture: name in the released file.
      quantization: `quantization_config` of the released file; None when it was not read.
    """

    layers: int
    owners: tuple[tuple[int, int], ...]
    layer_ratios: tuple[int, ...]
    window_size: int
    head_dim: int
    index_dim: int
    index_topk: int
    history_size: int
    engram_layers: tuple[int, ...]
    image_token_id: int
    eos_token_ids: tuple[int, ...]
    max_position: int
    num_attention_heads: int
    index_n_heads: int
    o_groups: int
    moe_intermediate_size: int
    n_routed_experts: int
    draft_layers: int = 0
    draft_tokens: int = 0
    architecture: str = SUPPORTED_ARCHITECTURE
    quantization: Mapping[str, Any] | None = None

    @classmethod
    def from_config(cls, config: Any, root: Mapping[str, Any] | None = None) -> ModelView:
        """Reads a parsed `ModelConfig`.

        Args:
          config: any object with the attributes of `v41jax.config.ModelConfig`.
          root: the released `config.json`, for the architecture name and the quantization scheme.
        """
        text = config.text
        architectures = (root or {}).get("architectures") or [SUPPORTED_ARCHITECTURE]
        return cls(
            layers=text.num_hidden_layers,
            owners=tuple(config.owners),
            layer_ratios=tuple(text.compress_ratios),
            window_size=text.sliding_window,
            head_dim=text.head_dim,
            index_dim=text.index_head_dim,
            index_topk=text.index_topk,
            history_size=text.engram_max_ngram_size - 1,
            engram_layers=tuple(text.engram_layer_ids),
            image_token_id=config.image_token_id,
            eos_token_ids=(config.eos_token_id,),
            max_position=text.max_position_embeddings,
            num_attention_heads=text.num_attention_heads,
            index_n_heads=text.index_n_heads,
            o_groups=text.o_groups,
            moe_intermediate_size=text.moe_intermediate_size,
            n_routed_experts=text.n_routed_experts,
            draft_layers=text.num_nextn_predict_layers,
            draft_tokens=text.dspark_block_size,
            architecture=str(architectures[0]),
            quantization=(root or {}).get("quantization_config"),
        )

    def decoder_replay_obstacle(self) -> str | None:
        """Why the decoder cannot skip prefill rows, or None when it can.

        Source: runtime specification, "Off switch".
        """
        if not self.owners:
            return "no layer owns compressed rows"
        boundary = self.owners[-1][0]
        if boundary + 1 >= self.layers:
            return f"no layer follows the last owner, layer {boundary}"
        late = [layer for layer in self.engram_layers if layer >= boundary]
        if late:
            return f"Engram layers {late} lie at or after layer {boundary}"
        return None
