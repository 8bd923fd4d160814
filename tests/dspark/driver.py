"""Drives the draft and the verify step without scheduler or engine: slots with known tokens, one call a step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from checkpoints.load import Checkpoint
from scheduler.pools import Pools, allocate, poison
from tests.helpers import golden
from v41jax.draft_parameters import DraftParameters, load_draft_parameters
from v41jax.dspark import DraftBlock, write_draft_context
from v41jax.engram_hashing import history_before
from v41jax.full_forward import LoadedModel, compressed_of, engram_rows_of, load_model
from v41jax.model import forward
from v41jax.precision import Precision
from v41jax.runner import empty_edits
from v41jax.sampling import SamplingInputs
from v41jax.spans import Span, batch_of
from v41jax.speculative_steps import VerifyOutput, draft_step, verify_step
from v41jax.verification import check_committed

WIDTH = 6
"""Rows of a request in a verify step at most: the anchor and five proposals."""

REQUESTS = 3
PREFILL_ROWS = 32
PAGES = 6
"""Pages of a slot, of 32 tokens each in these models."""

_open = contextlib.ExitStack()


@functools.cache
def load(dtype: str = "float32", quantized: bool = False, packed: bool = False) -> tuple[LoadedModel, DraftParameters]:
    """The five-layer golden checkpoint with its draft, opened once per process."""
    precision = Precision(jnp.dtype(dtype), quantized)
    directory = golden.directory("five-layer")
    model = _open.enter_context(
        load_model(directory, precision, max_model_len=256, speculative_tokens=WIDTH - 1, packed=packed)
    )
    return model, load_draft_parameters(open_checkpoint(), form="dequantized", dtype=precision.activation_dtype)


@functools.cache
def open_checkpoint() -> Checkpoint:
    """The same checkpoint for the reference: text and draft."""
    return _open.enter_context(Checkpoint.open(golden.directory("five-layer"), scopes=("text", "draft")))


@functools.partial(jax.jit, static_argnames=("setup",), donate_argnames=("pools",))
def _prefill(params, draft, pools, batch, engram_rows, setup):
    pools, output = forward(params, pools, batch, engram_rows, setup=setup, phase="prefill")
    pools = write_draft_context(draft, pools, output.taps, batch.slots, setup=setup)
    token = jnp.argmax(output.logits[0]).astype(jnp.int32)
    return pools.replace(last_token=pools.last_token.at[batch.slots[0]].set(token)), output.logits[0]


_verify = jax.jit(verify_step, static_argnames=("setup",), donate_argnames=("pools", "adjustments"))
_draft = jax.jit(draft_step, static_argnames=("setup", "confidence"))


def greedy(requests: int = REQUESTS) -> SamplingInputs:
    """Parameters that choose the largest logit."""
    return SamplingInputs(
        temperature=np.zeros(requests, np.float32),
        top_k=np.zeros(requests, np.int32),
        top_p=np.ones(requests, np.float32),
        min_p=np.zeros(requests, np.float32),
        seeds=np.zeros(requests, np.uint32),
        positions=np.zeros(requests, np.int32),
    )


class Driver:
    """Pools of a few slots and the committed tokens of each.

    Attributes:
      pools: live.
      tokens: slot -> committed tokens, those the target has processed.
      anchors: slot -> newest token.
    """

    def __init__(self, model: LoadedModel, draft: DraftParameters, slots: int = REQUESTS + 1):
        self.model, self.draft_weights = model, draft
        # Nobody may read what nobody wrote.
        self.pools: Pools = poison(allocate(model.setup.geometry, slots * PAGES, slots))
        self.adjustments = jnp.zeros((slots, model.setup.config.text.vocab_size), jnp.float32)
        self.tokens: dict[int, list[int]] = {}
        self.anchors: dict[int, int] = {}

    @property
    def geometry(self):
        return self.model.setup.geometry

    def _span(self, slot: int, start: int, ids: Sequence[int], **options: object) -> Span:
        compressed = compressed_of(self.model.lookup, np.array([*self.tokens[slot][:start], *ids], np.int32), None)
        return Span(
            start=start,
            token_ids=np.array(ids, np.int32),
            compressed_ids=compressed[start:],
            slot=slot,
            pages=range(slot * PAGES, (slot + 1) * PAGES),
            history=history_before(compressed[:start], start, self.geometry.history_size),
            **options,
        )

    def prefill(self, slot: int, prompt: Sequence[int]) -> NDArray[np.float32]:
        """Processes a prompt in chunks of one bucket; returns the last row's logits."""
        prompt = [int(token) for token in prompt]
        self.tokens[slot] = []
        for start in range(0, len(prompt), PREFILL_ROWS):
            ids = prompt[start : start + PREFILL_ROWS]
            batch = batch_of(
                [self._span(slot, start, ids)], self.geometry, rows=PREFILL_ROWS, output_rows=[len(ids) - 1]
            )
            rows = engram_rows_of(self.model.setup, self.model.lookup, batch)
            self.pools, logits = _prefill(
                self.model.params, self.draft_weights, self.pools, batch, rows, setup=self.model.setup
            )
            self.tokens[slot] += ids
        self.anchors[slot] = int(np.argmax(logits))
        return np.asarray(logits)

    def verify(
        self, proposals: Mapping[int, Sequence[int]], sampling: SamplingInputs | None = None
    ) -> tuple[list[list[int]], NDArray[np.float32]]:
        """Verifies 0..5 proposals of each named slot, in the order given.

        Returns:
          The emitted tokens of each, and the logits of every row.
        """
        spans = [
            self._span(slot, len(self.tokens[slot]), [self.anchors[slot], *drafted])
            for slot, drafted in proposals.items()
        ]
        batch = batch_of(spans, self.geometry, rows=REQUESTS * WIDTH, requests=REQUESTS, columns=PAGES)
        rows = engram_rows_of(self.model.setup, self.model.lookup, batch)
        output: VerifyOutput
        self.pools, self.adjustments, output = _verify(
            self.model.params,
            self.draft_weights,
            self.pools,
            self.adjustments,
            batch,
            rows,
            greedy() if sampling is None else sampling,
            empty_edits(REQUESTS * WIDTH, *self.adjustments.shape),
            np.bool_(False),
            setup=self.model.setup,
        )
        verified = jax.tree.map(np.asarray, output.verified)
        check_committed(verified.committed, [span.length for span in spans])
        assert not np.asarray(output.cursor_mismatch).any()
        emitted = []
        for index, span in enumerate(spans):
            count = int(verified.committed[index])
            emitted.append(verified.tokens[index, :count].tolist())
            self.tokens[span.slot] += span.token_ids[:count].tolist()
            self.anchors[span.slot] = emitted[-1][-1]
        return emitted, np.asarray(output.logits)

    def draft(
        self, slots: Sequence[int], sampling: SamplingInputs | None = None, confidence: bool = True
    ) -> DraftBlock:
        """Proposals for the named slots, in the order given."""
        padded = np.zeros(REQUESTS, np.int32)
        padded[: len(slots)] = slots
        live = np.arange(REQUESTS) < len(slots)
        block = _draft(
            self.model.params,
            self.draft_weights,
            self.pools,
            padded,
            live,
            sampling,
            setup=self.model.setup,
            confidence=confidence,
        )
        return jax.tree.map(np.asarray, block)

    def cursor_of_tokens(self, slot: int) -> list[int]:
        """What the slot's cursor must be: the committed position, then the last compressed ids."""
        compressed = compressed_of(self.model.lookup, np.array(self.tokens[slot], np.int32), None)
        end = compressed.size
        return [end, *history_before(compressed, end, self.geometry.history_size).tolist()]

    def state(self, slot: int) -> dict[str, NDArray]:
        """Everything of a slot that a later step can read, as bytes by name."""
        end, geometry = len(self.tokens[slot]), self.geometry
        visible = np.arange(max(0, end - geometry.window_size), end)
        pages = range(slot * PAGES, (slot + 1) * PAGES)
        members = np.arange(max(0, end - geometry.max_ratio + 1), end)
        result = {
            "cursor": np.asarray(self.pools.cursor[slot]),
            "anchor": np.asarray(self.pools.last_token[slot]),
            "window": np.asarray(self.pools.window)[:, slot, visible % geometry.ring],
            "tail_kv": np.asarray(self.pools.tail_kv)[:, slot, members % geometry.ring_c],
            "tail_score": np.asarray(self.pools.tail_score)[:, slot, members % geometry.ring_c],
        }
        for owner, (_, ratio) in enumerate(geometry.owners):
            for name in ("main", "index_values", "index_scales"):
                plane = getattr(self.pools, name)[owner]
                if plane is not None:
                    rows = np.asarray(plane)[list(pages)]
                    result[f"{name}[{owner}]"] = rows.reshape(-1, *rows.shape[2:])[: end // ratio]
        return result
