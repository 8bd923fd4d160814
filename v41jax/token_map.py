"""The compressed token map of the Engram layers: token id -> compressed id, built once from a tokenizer.

Token ids whose text is equal after normalization share one compressed id. Hashing of compressed ids is in
`engram_hashing`; nothing here knows about tables.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, normalizers

from v41jax.config import ModelConfig

TOKEN_MAP_FILE = "engram_token_map.json"
TOKENIZER_FILE = "tokenizer.json"

_REPLACEMENT_CHARACTER = "\ufffd"  # a decoded id that holds only a part of a UTF-8 sequence
_ONE_SPACE = "\ue000"  # keeps a token that is exactly one space from being stripped to nothing


class TokenMapError(ValueError):
    """A token map that is missing, malformed, or not the one the hash multipliers were derived from."""


def _normalizer() -> normalizers.Sequence:
    """The fixed normalization pipeline (Engram specification, "Token compression map", step 3)."""
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _ONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_ONE_SPACE, " "),
        ]
    )


_NORMALIZER = _normalizer()


def normalize_token_text(text: str) -> str:
    """The key of a token's decoded text; the text itself when normalization leaves nothing.

    Source: Engram specification, "Token compression map".
    """
    return _NORMALIZER.normalize_str(text) or text


def token_keys(tokenizer: Tokenizer) -> list[str]:
    """The key of every token id, ascending; ids with equal keys are one compressed id.

    Raises:
      TokenMapError: the vocabulary has holes, so that a key per id does not exist.
    """
    keys = []
    for token_id in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        raw = tokenizer.id_to_token(token_id)
        if raw is None:
            raise TokenMapError(f"token id {token_id} is missing from the tokenizer: ids must be 0..n-1 without holes")
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        keys.append(raw if _REPLACEMENT_CHARACTER in text else normalize_token_text(text))
    return keys


def build_token_map(tokenizer: Tokenizer) -> NDArray[np.int32]:
    """Compressed id of every token id, [len(tokenizer)] int32; a new key takes the next integer.

    About half a second for a vocabulary of 129,280, so no cache is kept on disk.

    Source: Engram specification, "Token compression map".
    """
    first_seen: dict[str, int] = {}
    return np.array([first_seen.setdefault(key, len(first_seen)) for key in token_keys(tokenizer)], np.int32)


def check_token_map(token_map: NDArray[np.int32], config: ModelConfig, origin: str) -> None:
    """Refuses a map that the checkpoint's tables were not addressed with.

    Args:
      token_map: [n] int32.
      config: states the number of compressed ids and the vocabulary.
      origin: named in the errors.

    Raises:
      TokenMapError: with every broken rule.
    """
    text = config.text
    faults = []
    distinct = np.unique(token_map)
    size = int(distinct.size)
    if size != text.engram_compressed_vocab_size:
        faults.append(
            f"{size} compressed ids where the config's engram_compressed_vocab_size is "
            f"{text.engram_compressed_vocab_size}: every hash multiplier depends on it"
        )
    if size and (distinct[0] != 0 or distinct[-1] != size - 1):
        faults.append(f"compressed ids span {distinct[0]}..{distinct[-1]} where 0..{size - 1} is needed")
    if token_map.size < text.vocab_size:
        faults.append(f"{token_map.size} entries where vocab_size is {text.vocab_size}")
    if text.engram_pad_token_id >= token_map.size:
        faults.append(f"engram_pad_token_id {text.engram_pad_token_id} is not among its {token_map.size} entries")
    if faults:
        raise TokenMapError(f"{origin}: " + "; ".join(faults))


def _read_token_map(path: Path) -> NDArray[np.int32]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise TokenMapError(f"{path}: not a readable JSON list of integers ({error})") from error
    valid = isinstance(values, list) and all(type(value) is int and 0 <= value < 2**31 for value in values)
    if not valid:
        raise TokenMapError(f"{path}: must be one JSON list of non-negative integers, one a token id")
    return np.array(values, np.int32)


def load_token_map(directory: Path, config: ModelConfig) -> NDArray[np.int32]:
    """The checked map of a checkpoint directory, [n >= vocab_size] int32.

    `engram_token_map.json` (a list of integers), when present, replaces the map built from `tokenizer.json`.

    Raises:
      TokenMapError: neither file exists, a file is malformed, or the map does not fit the config.
    """
    directory = Path(directory)
    ready, tokenizer_file = directory / TOKEN_MAP_FILE, directory / TOKENIZER_FILE
    if ready.exists():
        token_map, origin = _read_token_map(ready), str(ready)
    elif tokenizer_file.exists():
        try:
            tokenizer = Tokenizer.from_file(str(tokenizer_file))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise TokenMapError(f"{tokenizer_file}: not a readable tokenizer ({error})") from error
        token_map, origin = build_token_map(tokenizer), str(tokenizer_file)
    else:
        raise TokenMapError(
            f"{directory}: the Engram layers need {TOKEN_MAP_FILE} or {TOKENIZER_FILE}, and neither exists"
        )
    check_token_map(token_map, config, origin)
    return token_map
