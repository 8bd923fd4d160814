"""The two sides of a comparison: what they can be, and how their text form is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from checkpoints.load import Checkpoint
from v41jax.comparison.jax_subject import JaxSubject
from v41jax.comparison.options import Options
from v41jax.comparison.recording import Recording, read
from v41jax.comparison.reference_subject import ReferenceSubject
from v41jax.config import ModelConfig


class Subject(Protocol):
    """One side of a comparison."""

    options: Options
    config: ModelConfig

    def logits(self, ids: NDArray[np.int32]) -> NDArray:
        """Logits of the last rows free running, [rows, V]."""
        ...

    def observe(self, ids: NDArray[np.int32], given: Recording | None = None, *, until: int | None = None) -> Recording:
        """Tensors of every layer, or of the first `until` and no head; inputs are those of `given` where it is not
        None."""
        ...

    def close(self) -> None:
        """Closes its files."""
        ...


class RecordedSubject:
    """Activations recorded elsewhere, of one prompt."""

    def __init__(self, directory: Path, options: Options):
        assert options.file is not None
        self.options = options
        with Checkpoint.open(directory, scopes=("text",)) as checkpoint:
            self.config = checkpoint.config
            embed = np.asarray(checkpoint.tensor("embed.weight"), np.float32)
        text = self.config.text
        self.recording = read(options.file, options.prefix, len(self.config.layers), text.engram_layer_ids)
        streams = [layer["streams"] for layer in self.recording.layers]
        if all("pre_mix" in layer for layer in self.recording.layers):
            # What enters a layer is what the one before it left; the first gets the embedding.
            first = np.repeat(embed[self.recording.ids][:, None], text.hc_mult, axis=1)
            mix = np.zeros_like(self.recording.layers[0]["pre_mix"])
            mix[:, 0] = 1
            mixes = [mix, *(layer["pre_mix"] for layer in self.recording.layers[:-1])]
            self.recording.layer_inputs = (np.stack([first, *streams[:-1]]), np.stack(mixes))

    @property
    def ids(self) -> NDArray[np.int32]:
        """The prompt that was recorded."""
        return self.recording.ids

    def logits(self, ids: NDArray[np.int32]) -> NDArray:
        """The recorded logits.

        Raises:
          ValueError: another prompt, or a recording without logits.
        """
        self._check(ids)
        if self.recording.logits is None:
            raise ValueError(f"{self.options.file}: the recording has no logits")
        return self.recording.logits

    def observe(self, ids: NDArray[np.int32], given: Recording | None = None, *, until: int | None = None) -> Recording:
        """The recording, which nothing can be fed to."""
        self._check(ids)
        return self.recording

    def close(self) -> None:
        """Nothing is open."""

    def _check(self, ids: NDArray[np.int32]) -> None:
        if not np.array_equal(ids, self.ids):
            raise ValueError(f"{self.options.file}: it was recorded for another prompt")


def open_subject(directory: Path, options: Options, max_model_len: int, continuation: int) -> Subject:
    """Opens one side.

    Args:
      directory: checkpoint of the comparison.
      options: of the side.
      max_model_len: longest prompt.
      continuation: see `JaxSubject`.
    """
    directory = directory if options.model is None else options.model
    if options.kind == "npz":
        return RecordedSubject(directory, options)
    if options.kind == "reference":
        return ReferenceSubject(directory, options, max_model_len, continuation)
    return JaxSubject(directory, options, max_model_len, continuation)
