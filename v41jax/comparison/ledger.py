"""The ledger of approximations: `docs/numerics.md`, its budgets, and the check of both.

    python -m v41jax.comparison.ledger --out docs/numerics.md

measures every approximation that serving may use on a small random checkpoint and writes one table. Without `--out` it
prints. Exit code 1 when a distance is past its budget in `docs/numerics_budgets.toml`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from checkpoints.synthesize import synthesize
from v41jax.comparison.budgets import Budgets, budgets_of, past
from v41jax.comparison.metrics import EndDistance, end_distance
from v41jax.comparison.options import parse
from v41jax.comparison.recording import Recording
from v41jax.comparison.subjects import Subject, open_subject
from v41jax.config import ModelConfig
from v41jax.precision import Precision
from v41jax.presets import preset
from v41jax.replay_distance import MODES, continuation_logits

DEFAULT_BUDGETS = Path("docs/numerics_budgets.toml")
TOKENS, PROMPTS, CONTINUATION, SEED = 80, 2, 16, 11


@dataclasses.dataclass(frozen=True)
class Entry:
    """One approximation.

    Attributes:
      key: of its budget.
      name: in the table.
      left, right: sides; under `replay` right is the name of a mode of `replay_distance`.
      replay: measured on the continuation of a prompt that was prefilled by the scheduler's plan.
    """

    key: str
    name: str
    left: str
    right: str
    replay: bool = False


ENTRIES = (
    Entry("sum_order", "order of float32 sums (XLA against float64)", "reference:noquant", "xla:noquant"),
    Entry("quantized_sum_order", "the same with activation quantization", "reference", "xla"),
    Entry("bfloat16", "bfloat16 activations", "reference", "reference:dtype=bfloat16"),
    Entry("fp8_index", "FP8 index plane instead of FP4", "xla", "xla:index=fp8"),
    Entry("bf16_scores", "bfloat16 index scores", "xla", "xla:scores=bfloat16"),
    Entry("packed", "packed pools: FP4 main rows, FP8 windows", "xla", "xla:packed"),
    Entry("stored_weights", "weights as stored instead of widened", "xla", "xla:weights=stored"),
    Entry("chunks", "prefill in chunks", "xla", "full in chunks", replay=True),
    Entry("decoder_replay", "decoder bounded replay", "xla", "decoder replay", replay=True),
    Entry("encoder_replay", "encoder bounded replay", "xla", "encoder replay", replay=True),
    Entry("both_replays", "both replays", "xla", "both replays", replay=True),
)


@dataclasses.dataclass(frozen=True)
class Measured:
    """One line of the ledger.

    Attributes:
      entry: what was measured.
      layer_l2: largest relative L2 distance of a layer's streams when every layer is fed the left side's inputs; None
        for replay, which runs no layer on every row.
      end: of the logits, free running.
      past_budget: one line a measurement past its budget.
    """

    entry: Entry
    layer_l2: float | None
    end: EndDistance
    past_budget: tuple[str, ...]


def ledger_config() -> ModelConfig:
    """Every layer mode, in a model whose choices (top-k, candidates) bite within a hundred tokens."""
    return preset("pico")


def measure(directory: Path, prompts: Sequence[NDArray[np.int32]], budgets: dict[str, Budgets]) -> list[Measured]:
    """Measures every entry on one checkpoint.

    Args:
      directory: checkpoint.
      prompts: token ids.
      budgets: by key of the entry.
    """
    longest = max(len(ids) for ids in prompts)
    held = _Sides(directory, prompts, longest)
    results = []
    for entry in ENTRIES:
        layer_l2, end = held.replayed(entry) if entry.replay else held.observed(entry)
        lines = past(budgets.get(entry.key, Budgets()), end, None)
        results.append(Measured(entry, layer_l2, end, tuple(f"{entry.key}: {line}" for line in lines)))
    held.close()
    return results


class _Sides:
    """Sides opened once, with left's recordings."""

    def __init__(self, directory: Path, prompts: Sequence[NDArray[np.int32]], longest: int):
        self._directory, self._prompts, self._longest = directory, prompts, longest
        self._open: dict[str, Subject] = {}
        self._records: dict[str, list[Recording]] = {}
        self._full: list[NDArray[np.float64]] | None = None

    def close(self) -> None:
        for subject in self._open.values():
            subject.close()

    def side(self, text: str) -> Subject:
        """A side, float32 and quantized unless it says otherwise."""
        if text not in self._open:
            options = parse(text, Precision(jnp.float32, activation_quantization=True))
            self._open[text] = open_subject(self._directory, options, self._longest, CONTINUATION)
        return self._open[text]

    def recordings(self, text: str) -> list[Recording]:
        """Of every prompt, running free."""
        if text not in self._records:
            self._records[text] = [self.side(text).observe(ids) for ids in self._prompts]
        return self._records[text]

    def observed(self, entry: Entry) -> tuple[float, EndDistance]:
        """Layers fed left's inputs, and logits running free."""
        left, right = self.recordings(entry.left), self.side(entry.right)
        worst, pairs = 0.0, []
        for ids, given in zip(self._prompts, left):
            forced = right.observe(ids, given)
            for one, other in zip(given.layers, forced.layers):
                a, b = (np.asarray(layer["streams"], np.float64) for layer in (one, other))
                worst = max(worst, float(np.linalg.norm(a - b) / np.linalg.norm(a)))
            free = self.recordings(entry.right)[len(pairs)]
            assert given.logits is not None and free.logits is not None
            pairs.append((given.logits, free.logits, np.append(ids[1:], -1)))
        return worst, end_distance(*(np.concatenate(column) for column in zip(*pairs)))

    def replayed(self, entry: Entry) -> tuple[None, EndDistance]:
        """Logits of the continuation against those of a full prefill."""
        subject = self.side("xla:replay=both")
        loaded = subject.loaded  # type: ignore[attr-defined]
        mode = next(mode for mode in MODES if mode.name == entry.right)
        if self._full is None:
            self._full = [continuation_logits(loaded, ids, MODES[0], CONTINUATION) for ids in self._prompts]
        pairs = [
            (full, continuation_logits(loaded, ids, mode, CONTINUATION), ids[-CONTINUATION:])
            for full, ids in zip(self._full, self._prompts)
        ]
        return None, end_distance(*(np.concatenate(column) for column in zip(*pairs)))


def read_ledger_budgets(path: Path) -> dict[str, Budgets]:
    """Budgets by entry.

    Raises:
      ValueError: a file with unknown entries or measurements.
    """
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    unknown = set(data) - {entry.key for entry in ENTRIES}
    if unknown:
        raise ValueError(f"{path}: no entry {', '.join(sorted(unknown))}")
    return {key: budgets_of({"end": limits}, f"{path} [{key}]") for key, limits in data.items()}


def random_prompts(config: ModelConfig) -> list[NDArray[np.int32]]:
    """The prompts of the ledger."""
    random = np.random.default_rng(SEED)
    drawn = random.integers(0, config.text.vocab_size, (PROMPTS, TOKENS)).astype(np.int32)
    return list(np.where(drawn == config.image_token_id, 0, drawn).astype(np.int32))


_PAGE = """# Numerics

How far every approximation moves the model, measured by one command:

```console
$ python -m v41jax.comparison.ledger --out docs/numerics.md
```

{prompts} random prompts of {tokens} tokens on the preset `pico` with random weights (seed 7), float32 activations,
activation quantization on where the line does not say otherwise, JAX {jax} on a CPU. *Layer* is the worst relative
L2 distance of a layer's streams when every layer reads the left side's inputs, so that nothing accumulates; the
other columns are of the logits with both sides running free: mean relative L2, mean KL in nats, equal best tokens,
change of the NLL. Replays are measured on the last {continuation} tokens of each prompt, fed on top of the state
that the prefill left.

| approximation | left | right | layer | logits | KL | top-1 | NLL | budget |
|---|---|---|---:|---:|---:|---:|---:|---|
{rows}

A random model with activation quantization is chaotic: one value on the other side of a rounding boundary moves
everything after it, which is what the second line shows and what the others must be read against. The layer column
does not have this amplification. Exact by construction, and shown as zero: packed pools hold values that are
already on their grids. Drafts change no greedy token (`tests/dspark` compares states byte for byte) and have no
line.

Budgets are in `docs/numerics_budgets.toml`; `tests/comparison/test_ledger.py` measures again and fails past one. For a
checkpoint of your own use `v41jax compare` ([comparing](comparing.md)).
"""


def page(measured: Sequence[Measured], budgets: dict[str, Budgets]) -> str:
    """`docs/numerics.md`."""
    rows = []
    for item in measured:
        end, entry = item.end, item.entry
        layer = "" if item.layer_l2 is None else f"{item.layer_l2:.1e}"
        limits = budgets.get(entry.key, Budgets()).end
        budget = ", ".join(f"{name} {limit:g}" for name, limit in limits.items())
        rows.append(
            f"| {entry.name} | `{entry.left}` | `{entry.right}` | {layer} | {end.logits_mean:.1e} | {end.kl_mean:.1e} "
            f"| {end.top1:.0%} | {end.nll_change:+.4f} | {budget} |"
        )
    return _PAGE.format(
        prompts=PROMPTS, tokens=TOKENS, continuation=CONTINUATION, jax=jax.__version__, rows="\n".join(rows)
    )


def main() -> None:
    """Measures, writes or prints, and exits with 1 past a budget."""
    parser = argparse.ArgumentParser(description="Distance of every approximation.")
    parser.add_argument("--model", type=Path, help="checkpoint; by default one is synthesized")
    parser.add_argument("--budgets", type=Path, default=DEFAULT_BUDGETS)
    parser.add_argument("--out", type=Path, help="page to write; by default it is printed")
    arguments = parser.parse_args()
    budgets = read_ledger_budgets(arguments.budgets)
    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.model
        if directory is None:
            directory = Path(scratch) / "pico"
            synthesize(directory, ledger_config(), seed=7, scopes=("text",))
        from checkpoints.load import Checkpoint

        with Checkpoint.open(directory, scopes=("text",)) as checkpoint:
            prompts = random_prompts(checkpoint.config)
        measured = measure(directory, prompts, budgets)
    text = page(measured, budgets)
    if arguments.out is None:
        print(text)
    else:
        arguments.out.write_text(text, encoding="utf-8")
    lines = [line for item in measured for line in item.past_budget]
    for line in lines:
        print(f"past budget: {line}", file=sys.stderr)
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
