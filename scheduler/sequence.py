"""One request on the host: its tokens, its progress, its pages and slot, and what it reports.

Token ids live in one growing array. A placeholder stands for a token that a running forward will produce; it never
enters a hash, a finalized count or an output.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import numbers
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scheduler.batch import DEAD

PLACEHOLDER = -1
"""Token id of a position whose token is still being computed."""

RequestId = int | str


class SequenceStatus(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    ABORTED = "aborted"
    FINISHED = "finished"


class SequenceType(enum.Enum):
    """Which kind of forward a running request takes next."""

    PREFILL = "prefill"
    DECODE = "decode"


class SamplingError(ValueError):
    """Sampling parameters outside their limits; `faults` holds one line each."""

    def __init__(self, faults: list[str]):
        self.faults = tuple(faults)
        super().__init__("; ".join(faults))


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn and when a request stops.

    Attributes:
      max_tokens: generated tokens at most; at least 1.
      temperature: finite, from 0; 0 is greedy.
      top_k: candidates kept; 0 keeps all.
      top_p: probability mass kept, above 0 and at most 1.
      min_p: fraction of the best token's probability below which a token is dropped, 0 to 1.
      seed: of the request's own random stream, 32 bits; None lets the engine choose.
      ignore_eos: generate past the end-of-sequence id.
      stop_token_ids: ids that end the generation (reason `stop_<id>`).
      stop_sequences: id sequences that end the generation (reason `stop_sequence`).
      presence_penalty: subtracted from the logit of every token generated before.
      frequency_penalty: subtracted once for each time the token was generated.
      logit_bias: (token id, bias) pairs, added to the logits; ids are unique.
      logprobs: alternatives reported with every token; None reports no log-probability.
      prompt_logprobs: log-probabilities of every prompt token are wanted.

    Raises:
      SamplingError: with every number outside its limits.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        faults = [*self._whole_number_faults(), *self._number_faults()]
        if faults:
            raise SamplingError(faults)

    def _whole_number_faults(self) -> Iterator[str]:
        for name, low, high in (("max_tokens", 1, math.inf), ("top_k", 0, 2**31 - 1), ("seed", 0, 2**32 - 1)):
            value = getattr(self, name)
            if name == "seed" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not low <= int(value) <= high:
                yield f"{name} {value!r} must be a whole number of at least {low}" + (
                    "" if high == math.inf else f" and at most {high}"
                )

    def _number_faults(self) -> Iterator[str]:
        for name, low, high in (("temperature", 0, math.inf), ("top_p", 0, 1), ("min_p", 0, 1)):
            value = getattr(self, name)
            legal = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
            if not legal or not low <= value <= high or (name == "top_p" and not value):
                span = "from 0" if high == math.inf else f"{'above' if name == 'top_p' else 'from'} 0 to 1"
                yield f"{name} {value!r} must be a number {span}"

    @property
    def adjusts_logits(self) -> bool:
        """Biases or penalties change the logits."""
        return bool(self.logit_bias or self.presence_penalty or self.frequency_penalty)


class ImageSpan(NamedTuple):
    """Consecutive prompt positions of one image.

    Attributes:
      start: first position.
      length: positions, delimiters included.
      digest: identity of the processed image content and layout; equal content gives equal bytes.
    """

    start: int
    length: int
    digest: bytes


class RequestOutput(NamedTuple):
    """What one step gave a request.

    Attributes:
      request_id: the request.
      new_tokens: tokens finalized by this step, in order; empty for a refusal or a cancellation.
      finished: no output follows.
      finish_reason: None while running; else `eos`, `stop_<id>`, `stop_sequence`, `max_tokens`, `aborted`, or a text
        that begins with `unschedulable:` or `failed:`.
      prompt_tokens: length of the prompt.
      output_tokens: tokens generated so far.
      cached_tokens: prefix tokens reused by the latest admission.
    """

    request_id: RequestId
    new_tokens: tuple[int, ...]
    finished: bool
    finish_reason: str | None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


class Sequence:
    """A request and its progress; owned and mutated by the scheduler only.

    Attributes:
      request_id: caller's name, unique among live requests.
      generation: set anew whenever the request gains or loses its pages, never repeated within a scheduler, even when
        a request id is used again; results of another generation are stale.
      sampling: stop rules and sampling parameters.
      images: image spans of the prompt, ascending and disjoint.
      num_prompt_tokens: prompt length.
      num_tokens: tokens including placeholders.
      num_finalized_tokens: tokens without placeholders.
      num_computed: tokens whose KV is valid (the single truth for progress).
      prefill_end: frozen at admission; a forward that ends there is final.
      num_hashed_tokens: tokens whose blocks are published or were found published.
      block_table: page ids, entry k covers tokens `[k * PAGE, (k + 1) * PAGE)`.
      slot: state slot, -1 without one.
      status: see `SequenceStatus`.
      reported_hit_tokens: prefix tokens reused by the latest admission.
      demand_pos: boundary at which a missing checkpoint image shortened a hit; 0 without one.
      last_checkpoint_pos: position of the latest image kept for this request.
      block_hashes: memoised chained hashes of the leading full blocks.
      drafts: tokens proposed to follow the newest one, of this generation; empty without.
      cache_keys: memoised names of these blocks' pages outside the device.
      arrival: scheduler clock at submission, seconds.
    """

    __slots__ = (
        "_tokens",
        "arrival",
        "block_hashes",
        "block_table",
        "cache_keys",
        "demand_pos",
        "drafts",
        "generation",
        "images",
        "last_checkpoint_pos",
        "num_computed",
        "num_finalized_tokens",
        "num_hashed_tokens",
        "num_prompt_tokens",
        "num_tokens",
        "prefill_end",
        "reported_hit_tokens",
        "request_id",
        "sampling",
        "slot",
        "status",
    )

    def __init__(
        self,
        request_id: RequestId,
        prompt: ArrayLike,
        sampling: SamplingParams | None = None,
        images: tuple[ImageSpan, ...] = (),
    ):
        """Makes a waiting request.

        Args:
          request_id: unique among live requests.
          prompt: [n] token ids, n >= 1, none negative.
          sampling: defaults to `SamplingParams()`.
          images: spans inside the prompt, ascending and disjoint.

        Raises:
          ValueError: with every broken rule.
        """
        ids = np.asarray(prompt, dtype=np.int32).reshape(-1)
        self.sampling = sampling or SamplingParams()
        self.images = tuple(images)
        faults = []
        if not len(ids):
            faults.append("the prompt is empty: give at least one token")
        elif int(ids.min()) < 0:
            faults.append(f"the prompt holds token id {int(ids.min())}: ids must not be negative")
        end = 0
        for span in self.images:
            if span.start < end or span.length < 1 or span.start + span.length > len(ids):
                faults.append(f"image span {span.start}+{span.length} overlaps another or leaves the prompt")
            end = span.start + span.length
        if faults:
            raise ValueError("; ".join(faults))
        self.request_id = request_id
        self.generation = 0
        self.num_prompt_tokens = len(ids)
        self.num_tokens = len(ids)
        self.num_finalized_tokens = len(ids)
        self._tokens = np.empty(len(ids) + 64, np.int32)
        self._tokens[: len(ids)] = ids
        self.num_computed = 0
        self.prefill_end = len(ids)
        self.num_hashed_tokens = 0
        self.block_table: list[int] = []
        self.slot = -1
        self.status = SequenceStatus.WAITING
        self.reported_hit_tokens = 0
        self.demand_pos = 0
        self.last_checkpoint_pos = 0
        self.block_hashes: list[int] = []
        self.drafts: tuple[int, ...] = ()
        self.cache_keys: list[bytes] = []
        self.arrival = 0.0

    # Tokens --------------------------------------------------------------------------------------------------

    def token(self, position: int) -> int:
        """Token id at `position`, PLACEHOLDER while it is being computed."""
        return int(self._tokens[position])

    def tokens(self, start: int, end: int) -> NDArray[np.int32]:
        """View of the token ids of `[start, end)`; do not keep it across appends."""
        return self._tokens[start:end]

    @property
    def num_output_tokens(self) -> int:
        """Finalized generated tokens."""
        return self.num_finalized_tokens - self.num_prompt_tokens

    @property
    def output_tokens(self) -> tuple[int, ...]:
        """Finalized generated tokens, in order."""
        return tuple(self._tokens[self.num_prompt_tokens : self.num_finalized_tokens].tolist())

    @property
    def is_partial_prefill(self) -> bool:
        """Some tokens below `prefill_end` have no KV yet."""
        return self.num_computed < self.prefill_end

    @property
    def type(self) -> SequenceType:
        """Kind of the next forward."""
        return SequenceType.PREFILL if self.is_partial_prefill else SequenceType.DECODE

    @property
    def num_placeholders(self) -> int:
        """Tokens that running forwards still owe."""
        return self.num_tokens - self.num_finalized_tokens

    def append_placeholder(self) -> None:
        """Makes room for the token that a dispatched forward will produce."""
        if self.num_tokens == len(self._tokens):
            grown = np.empty(2 * len(self._tokens), np.int32)
            grown[: self.num_tokens] = self._tokens[: self.num_tokens]
            self._tokens = grown
        self._tokens[self.num_tokens] = PLACEHOLDER
        self.num_tokens += 1

    def finalize(self, position: int, token: int) -> None:
        """Writes the token a forward produced over its placeholder; positions arrive in order."""
        if position != self.num_finalized_tokens or position >= self.num_tokens:
            raise RuntimeError(
                f"request {self.request_id!r}: token for position {position} arrived, but "
                f"{self.num_finalized_tokens} of {self.num_tokens} tokens are finalized"
            )
        self._tokens[position] = token
        self.num_finalized_tokens = position + 1

    def strip_placeholders(self) -> None:
        """Forgets tokens that are still being computed."""
        self.num_tokens = self.num_finalized_tokens

    # Images and history --------------------------------------------------------------------------------------

    def image_mask(self, start: int, end: int) -> NDArray[np.bool_]:
        """[end - start] bool, True where the position lies in an image span."""
        mask = np.zeros(end - start, np.bool_)
        for span in self.images:
            low, high = max(span.start, start), min(span.start + span.length, end)
            if low < high:
                mask[low - start : high - start] = True
        return mask

    def history(self, position: int, size: int) -> NDArray[np.int32]:
        """Token ids of the `size` positions before `position`, oldest first.

        DEAD stands for image positions and for positions below 0 (runtime specification, "Quantities of that
        forward"). The ids are raw; the caller maps them to compressed ids.
        """
        ids = np.full(size, DEAD, np.int32)
        low = max(0, position - size)
        if position > low:
            ids[size - (position - low) :] = self._tokens[low:position]
            if self.images:
                ids[size - (position - low) :][self.image_mask(low, position)] = DEAD
        return ids
