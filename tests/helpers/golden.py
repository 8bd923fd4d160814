"""The golden data: two tiny checkpoints in the released layout and an independent implementation's answers.

See `tests/golden/README.md` for what every array means.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
CHECKPOINTS = ("pico", "five-layer")
MODES = ("noquant", "quant")
PROMPTS = range(6)
LOGIT_ROWS = 64
"""Recorded logits cover the last this many positions of a prompt."""

_START, _PATCH, _NEWLINE, _END = range(4)


def directory(name: str) -> Path:
    """The checkpoint directory of one of `CHECKPOINTS`."""
    if name not in CHECKPOINTS:
        raise ValueError(f"no golden checkpoint {name!r}: they are {', '.join(CHECKPOINTS)}")
    return GOLDEN / name


class Expected(Mapping[str, NDArray]):
    """The arrays of one `expected.npz`, by their key in the file, with names for the ones tests ask for.

    Arrays are shared between tests and read-only.
    """

    def __init__(self, name: str):
        with np.load(directory(name) / "expected.npz") as file:
            self._arrays = {key: file[key] for key in file.files}
        for array in self._arrays.values():
            array.setflags(write=False)

    def __getitem__(self, key: str) -> NDArray:
        return self._arrays[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def prompt(self, index: int) -> NDArray[np.int32]:
        """Token ids of prompt 0..5, [n]."""
        return self[f"prompt{index}"]

    def logits(self, mode: str, index: int) -> NDArray[np.float32]:
        """[min(n, LOGIT_ROWS), vocab], the last positions of prompt `index`."""
        return self[f"{mode}.float32.logits{index}"]

    def recorded(self, mode: str, what: str) -> NDArray:
        """`rec_prompt`, `streams`, `pre_mix`, `topk{L}`, `engram_hash`, `image_embeds` or `image_logits`."""
        return self[f"{mode}.float32.{what}"]

    def index_sources(self, mode: str) -> tuple[int, ...]:
        """Layers whose top-k was recorded, ascending."""
        prefix = f"{mode}.float32.topk"
        return tuple(sorted(int(key.removeprefix(prefix)) for key in self if key.startswith(prefix)))


@functools.cache
def load_expected(name: str) -> Expected:
    """The recorded answers of one checkpoint, read once."""
    return Expected(name)


def image_span(expected: Expected, image_token_id: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """The image prompt: ids [n] and the rows of its one span, [n] bool, delimiters included."""
    ids = expected["image.ids"]
    rows = ids == image_token_id
    assert rows.sum() == expected["image.types"].size
    return ids, rows


def span_embeddings(
    types: NDArray[np.integer],
    patches: NDArray[np.floating],
    start: NDArray[np.floating],
    newline: NDArray[np.floating],
    end: NDArray[np.floating],
) -> NDArray[np.float64]:
    """Embeddings of a span in row order, [len(types), hidden].

    Args:
      types: 0 start, 1 image, 2 newline, 3 end.
      patches: [image positions, hidden] in reading order.
      start, newline, end: [hidden], the three learned delimiters.
    """
    result = np.empty((types.size, patches.shape[1]))
    result[types == _PATCH] = patches
    for code, vector in ((_START, start), (_NEWLINE, newline), (_END, end)):
        result[types == code] = np.asarray(vector, np.float64)
    return result
