"""Runs any mixture of requests through the compiled forward, over shared pools whose unused memory holds NaN."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from scheduler.batch import BatchStep
from scheduler.pools import Pools, allocate, poison
from v41jax.engram_hashing import history_before
from v41jax.full_forward import LoadedModel, compressed_of, engram_rows_of, step
from v41jax.layers.rows import Phase
from v41jax.model import ForwardOutput, Record
from v41jax.spans import Span, batch_of


@dataclasses.dataclass
class Request:
    """One prompt on its way through the model.

    Attributes:
      token_ids: [n] all its ids.
      image_rows: [n] bool.
      embeddings: [n, D], read at image rows.
      slot: state slot.
      pages: page ids that cover it.
      compressed: [n] Engram ids.
      done: rows already run.
      logits: one array per row run.
    """

    token_ids: NDArray[np.int32]
    image_rows: NDArray[np.bool_]
    embeddings: NDArray[np.float32]
    slot: int
    pages: Sequence[int]
    compressed: NDArray[np.int32]
    done: int = 0
    logits: list[NDArray[np.float32]] = dataclasses.field(default_factory=list)


class Driver:
    """Requests over one set of pools and one bucket of compiled step.

    Every run asks for records and carries (possibly empty) image embeddings, so that all tests of one model and
    bucket share one program.

    Args of the constructor:
      model: loaded.
      rows, requests, columns: the bucket.
      pages, slots: sizes of the pools; they start poisoned.
      seed: of the order in which pages are handed out.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        rows: int = 64,
        requests: int = 4,
        columns: int = 9,
        pages: int = 40,
        slots: int = 6,
        seed: int = 0,
    ):
        self.model = model
        self.bucket = {"rows": rows, "requests": requests, "columns": columns}
        self.pools: Pools = poison(allocate(model.setup.geometry, pages, slots))
        order = np.random.default_rng(seed)
        self._pages = [int(page) for page in order.permutation(pages)]
        self._slots = [int(slot) for slot in order.permutation(slots)]
        self.requests: dict[Hashable, Request] = {}
        self.records: list[Record] = []
        self.mismatches: list[NDArray[np.bool_]] = []

    def add(
        self,
        name: Hashable,
        token_ids: NDArray,
        image_rows: NDArray | None = None,
        image_embeddings: NDArray | None = None,
    ) -> None:
        """Gives a prompt a slot and pages."""
        ids = np.asarray(token_ids, np.int32)
        image = np.zeros(ids.size, bool) if image_rows is None else np.asarray(image_rows, bool)
        embeddings = np.zeros((ids.size, self.model.setup.config.text.hidden_size), np.float32)
        if image_embeddings is not None:
            embeddings[image] = image_embeddings
        count = self.model.setup.geometry.pages_for(ids.size)
        pages = [self._pages.pop() for _ in range(count)]
        compressed = compressed_of(self.model.lookup, ids, image)
        self.requests[name] = Request(ids, image, embeddings, self._slots.pop(), pages, compressed)

    def release(self, name: Hashable) -> NDArray[np.float32]:
        """Hands pages and slot back; returns the logits of all rows run."""
        request = self.requests.pop(name)
        self._pages += request.pages
        self._slots.append(request.slot)
        return np.concatenate(request.logits)

    def span(self, name: Hashable, length: int, **fields: object) -> Span:
        """The next `length` rows of a request."""
        request = self.requests[name]
        rows = slice(request.done, request.done + length)
        return Span(
            start=request.done,
            token_ids=request.token_ids[rows],
            compressed_ids=request.compressed[rows],
            slot=request.slot,
            pages=request.pages,
            history=history_before(request.compressed, request.done, self.model.setup.geometry.history_size),
            image_rows=request.image_rows[rows],
            **fields,
        )

    def run(self, lengths: dict[Hashable, int], phase: Phase = "prefill") -> ForwardOutput:
        """One forward over the next rows of some requests, in the order given."""
        spans = [self.span(name, length) for name, length in lengths.items()]
        batch = batch_of(spans, self.model.setup.geometry, **self.bucket)
        embeddings = np.zeros((self.bucket["rows"], self.model.setup.config.text.hidden_size), np.float32)
        first = 0
        for name, length in lengths.items():
            request = self.requests[name]
            rows = slice(request.done, request.done + length)
            embeddings[first : first + length] = request.embeddings[rows]
            first += length
        output = self.forward(batch, embeddings, phase)
        logits = np.asarray(output.logits)
        first = 0
        for name, length in lengths.items():
            self.requests[name].logits.append(logits[first : first + length])
            self.requests[name].done += length
            first += length
        return output

    def forward(self, batch: BatchStep, image_embeddings: NDArray, phase: Phase = "prefill") -> ForwardOutput:
        """One forward over a given batch."""
        self.pools, output = step(
            self.model.params,
            self.pools,
            batch,
            engram_rows_of(self.model.setup, self.model.lookup, batch),
            setup=self.model.setup,
            phase=phase,
            image_embeddings=image_embeddings,
            record=True,
        )
        self.records.append(output.record)
        self.mismatches.append(np.asarray(output.cursor_mismatch))
        return output

    def logits(self, token_ids: NDArray, chunks: Sequence[int], **image: NDArray) -> NDArray[np.float32]:
        """All logits of one prompt run alone in these chunks, the last repeated."""
        self.add("alone", token_ids, **image)
        total, sizes = len(token_ids), list(chunks)
        while self.requests["alone"].done < total:
            size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            self.run({"alone": min(size, total - self.requests["alone"].done)})
        return self.release("alone")


def random_lengths(
    remaining: dict[Hashable, int], capacity: int, requests: int, random: np.random.Generator
) -> dict[Hashable, int]:
    """A random non-empty mixture: some requests in random order, random lengths, within a bucket."""
    names = [name for name, left in remaining.items() if left]
    chosen = random.permutation(len(names))[: random.integers(1, min(len(names), requests) + 1)]
    lengths: dict[Hashable, int] = {}
    for index in chosen:
        name = names[index]
        most = min(remaining[name], capacity - sum(lengths.values()))
        if most:
            lengths[name] = int(random.integers(1, most + 1))
    return lengths
