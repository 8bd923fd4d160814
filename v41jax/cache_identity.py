"""What pages outside the device depend on besides the tokens: weights, tokenizer, layout and arithmetic.

Weights of hundreds of gigabytes are not hashed as a whole: names, shapes and samples of every tensor tell two
checkpoints apart as long as a change of a tensor changes about every thousandth of its bytes. `cache_model_id` replaces
this where an operator knows better.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from checkpoints.load import Checkpoint
from scheduler.pool_geometry import V41PoolGeometry
from scheduler.runtime_config import EngineConfig
from scheduler.tiers.keys import CacheIdentity
from scheduler.tiers.layout import TransferLayout
from v41jax.engram_lookup import EngramLookup
from v41jax.token_map import TOKENIZER_FILE

SAMPLE_BYTES = 512
SAMPLES = 2
"""Samples of a tensor, evenly spread over it."""


def model_identity(checkpoint: Checkpoint) -> str:
    """Hash of the configuration and of samples of every opened tensor; equal for copies of a checkpoint."""
    digest = hashlib.blake2b(digest_size=32)
    root = json.loads((checkpoint.directory / "config.json").read_text())
    digest.update(json.dumps(root, sort_keys=True).encode())
    files: dict[Path, int] = {}
    try:
        for name in sorted(checkpoint.names):
            path, entry = checkpoint.location(name)
            if path not in files:
                files[path] = os.open(path, os.O_RDONLY)
            digest.update(f"{name} {entry.dtype} {entry.shape}".encode())
            size = entry.end - entry.begin
            for sample in range(SAMPLES):
                start = entry.begin + size * (2 * sample + 1) // (2 * SAMPLES)
                digest.update(os.pread(files[path], min(SAMPLE_BYTES, entry.end - start), start))
    finally:
        for handle in files.values():
            os.close(handle)
    return digest.hexdigest()


def token_identity(directory: Path, lookup: EngramLookup | None) -> str:
    """Hash of the tokenizer file, if there is one, and of the compressed token map, if the model uses one."""
    digest = hashlib.blake2b(digest_size=32)
    tokenizer = directory / TOKENIZER_FILE
    digest.update(tokenizer.read_bytes() if tokenizer.is_file() else b"no tokenizer")
    if lookup is not None:
        digest.update(lookup.hasher.token_map.tobytes())
    return digest.hexdigest()


def cache_identity(
    config: EngineConfig, geometry: V41PoolGeometry, checkpoint: Checkpoint, lookup: EngramLookup | None
) -> CacheIdentity:
    """The identity of an engine's pages. Kernels and buckets are not part of it: they only change rounding noise."""
    computation = {
        "dtype": config.dtype,
        "activation_quantization": config.activation_quantization,
        "state": "replay" if config.encoder_swa_bounded_replay else "copy",
        "decoder_replay": config.decoder_swa_bounded_replay,
    }
    return CacheIdentity(
        model=config.cache_model_id or model_identity(checkpoint),
        tokens=token_identity(checkpoint.directory, lookup),
        layout_id=TransferLayout.of(geometry).layout_id,
        computation=json.dumps(computation, sort_keys=True),
    )
