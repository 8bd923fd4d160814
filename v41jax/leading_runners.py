"""The runners of process 0 of several: whatever they do, the followers are told to do too, in the same order.

A follower has the same weights, pools and programs and makes none of the decisions; what it cannot compute itself
travels with the order. `multihost.follow` is the other side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from scheduler.batch import BatchStep, EngramRows
from scheduler.buckets import StepShape
from scheduler.states import StateMaintenanceOps
from v41jax.dspark import DraftBlock
from v41jax.mesh_draft_runner import MeshDraftRunner
from v41jax.mesh_runner import MeshRunner
from v41jax.multihost import Followers
from v41jax.page_transfer import TransferName
from v41jax.runner import StepOutput, StepSampling
from v41jax.sampling import SamplingInputs

BUILD_OPTIONS = ("num_pages", "num_slots", "num_images", "scores_prompts", "confidence")
"""Options of a runner that process 0 chooses."""


class LeadingRunner(MeshRunner):
    """A `MeshRunner` that followers repeat."""

    def __init__(self, *arguments: Any, followers: Followers, **options: Any):
        """Args:
        arguments, options: of the runner.
        followers: the other processes.
        """
        self._followers = followers
        self._warming = False
        followers.send("build", {name: options[name] for name in BUILD_OPTIONS if name in options})
        super().__init__(*arguments, **options)

    def warm_up(self, shapes: Iterable[StepShape], *, images: bool = False, drafts: Iterable[int] = ()) -> None:
        """As of `ModelRunner`."""
        shapes, drafts = tuple(shapes), tuple(drafts)
        self._followers.send("warm_up", shapes, images, drafts)
        self._warming = True
        super().warm_up(shapes, images=images, drafts=drafts)
        self._warming = False

    def execute(
        self,
        shape: StepShape,
        batch: BatchStep,
        engram_rows: EngramRows,
        sampling: StepSampling,
        ops: StateMaintenanceOps | None = None,
        image_rows: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> StepOutput:
        """As of `ModelRunner`; table rows of the Engram do not travel, each host reads its own files."""
        self._followers.send("execute", shape, batch, sampling, ops, image_rows)
        return super().execute(shape, batch, engram_rows, sampling, ops, image_rows)

    def load_adjustments(self, slot: int, row: np.ndarray) -> None:
        """As of `ModelRunner`."""
        if not self._warming:
            self._followers.send("load_adjustments", slot, row)
        super().load_adjustments(slot, row)

    def transfer(self, name: TransferName, *arguments: Any) -> Any:
        """As of `ModelRunner`."""
        self._followers.send("transfer", name, *arguments)
        return super().transfer(name, *arguments)


class LeadingDraftRunner(LeadingRunner, MeshDraftRunner):
    """A `MeshDraftRunner` that followers repeat."""

    def draft(
        self, requests: int, slots: Sequence[int], sampling: SamplingInputs, places: Sequence[int] | None = None
    ) -> DraftBlock:
        """As of `DraftRunner`."""
        self._followers.send("draft", requests, slots, sampling, places)
        return super().draft(requests, slots, sampling, places)
