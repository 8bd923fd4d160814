"""A checkpoint whose Markov head was replaced so that the draft follows given bigrams: acceptance at will."""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from checkpoints.load import Checkpoint

STRENGTH = 16.0
"""Times two, the least logit by which a planted successor leads: more than base logits of the golden models span."""


class PlantedCheckpoint:
    """An open checkpoint with other Markov tables.

    Every successor has a code of +-1, its row of W2 times `STRENGTH`; a token's row of W1 is the code of its
    successor. Distinct codes of length `rank` differ by two or more in their product.
    """

    def __init__(self, checkpoint: Checkpoint, successors: Mapping[int, int]):
        text = checkpoint.config.text
        self._checkpoint = checkpoint
        self.config = checkpoint.config
        shape = (text.vocab_size, text.dspark_markov_rank)
        embed, head = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        targets = sorted(set(successors.values()))
        numbers = np.random.default_rng(0).choice(1 << 16, len(targets), replace=False)
        codes = {
            token: 2.0 * (number >> np.arange(shape[1]) & 1) - 1 for token, number in zip(targets, numbers.tolist())
        }
        for token, code in codes.items():
            head[token] = STRENGTH * code
        for token, successor in successors.items():
            embed[token] = codes[successor]
        prefix = f"mtp.{text.num_nextn_predict_layers - 1}.markov_head"
        self._planted = {
            f"{prefix}.embed.weight": embed.astype(ml_dtypes.bfloat16),
            f"{prefix}.head.weight": head.astype(ml_dtypes.bfloat16),
        }

    def tensor(self, name: str) -> NDArray:
        return self._planted[name] if name in self._planted else self._checkpoint.tensor(name)

    def release(self, name: str) -> None:
        if name not in self._planted:
            self._checkpoint.release(name)
