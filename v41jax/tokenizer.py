"""The tokenizer of a checkpoint: text to ids and back, with control tokens kept apart from text.

BPE itself is the `tokenizers` library's. Here is what serving needs around it: text of a caller is encoded by a
tokenizer that knows no control tokens at all, so none can come out of it; and every id has its bytes, from which text
is put together piece by piece. Incremental text is in `detokenizer.py`.
"""

from __future__ import annotations

import collections
import json
import threading
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.models import WordLevel

from v41jax.detokenizer import Detokenizer
from v41jax.protocol.json_text import unencodable
from v41jax.protocol.tokens import CONTROL_TOKENS, MARKUP_TOKENS, STOP_TOKENS

FAMILY_STAND_INS: Mapping[str, str] = {
    "<｜System｜>": "<｜place▁holder▁for▁copy｜>",
    "<｜deepseek_image｜>": "<｜image2｜>",
}
"""Control token -> token used for it by a tokenizer of the model family that predates this release.

The image token kept its id (129264) and was renamed. The id of the system token is only in the released file, so its
stand-in is merely a token that nothing else uses: good for random weights and tests, wrong for released weights, whose
own file has the name and never needs it.
"""

_CACHED_FROM = 256  # characters; shorter texts encode faster than they are worth keeping


class TokenizerError(ValueError):
    """A tokenizer file that cannot serve this model, or text that has no UTF-8 form."""


class Tokenizer:
    """Encodes and decodes. Safe to use from several threads.

    Attributes:
      vocab_size: ids are below it.
      stand_ins: control tokens this file lacks -> the tokens used in their place (see `FAMILY_STAND_INS`).
      stop_ids: generation ends at any of these.
      cached_characters: length of the texts whose ids are kept now.

    Args:
      definition: the parsed content of a `tokenizer.json`.
      stand_ins: control token -> name to look for when the file does not have it.
      cache_characters: text whose ids are kept, in characters. A conversation is encoded again at every turn, and all
        but its end is the same.

    Raises:
      TokenizerError: with everything the file lacks.
    """

    def __init__(
        self,
        definition: Mapping[str, Any],
        stand_ins: Mapping[str, str] = FAMILY_STAND_INS,
        cache_characters: int = 16_000_000,
    ):
        added, vocab = _check(definition)
        present = {token["content"] for token in added}
        self.stand_ins = {
            token: stand_ins[token]
            for token in CONTROL_TOKENS
            if token not in present and stand_ins.get(token) in present
        }
        missing = [token for token in CONTROL_TOKENS if token not in present and token not in self.stand_ins]
        if missing:
            raise TokenizerError(f"the tokenizer has no {', '.join(missing)}; it is not a tokenizer of this model")
        names = {stand_in: token for token, stand_in in self.stand_ins.items()}
        added = [{**token, "content": names.get(token["content"], token["content"])} for token in added]
        self._added: dict[str, int] = {token["content"]: token["id"] for token in added}
        self._added_ids = frozenset(self._added.values())
        self._hideable = frozenset(token["id"] for token in added if token["special"]) | {
            self._added[token] for token in CONTROL_TOKENS if token not in MARKUP_TOKENS
        }
        self._bytes = _byte_table(vocab, self._added)
        self.vocab_size = len(self._bytes)
        self.stop_ids = frozenset(self._added[token] for token in STOP_TOKENS)
        self._plain = LibraryTokenizer.from_str(json.dumps({**definition, "added_tokens": []}))
        self._splitter = _splitter(added)
        self._cache: collections.OrderedDict[str, array[int]] = collections.OrderedDict()
        self.cached_characters = 0
        self._cache_characters = cache_characters
        self._lock = threading.Lock()
        for token in CONTROL_TOKENS:
            if not self._added_ids.isdisjoint(self.encode(token)):
                raise TokenizerError(f"the text {token} would become a control token; the vocabulary can spell it")

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Reads `tokenizer.json` of a checkpoint.

        Raises:
          TokenizerError: no such file, or one that does not fit.
        """
        path = Path(directory) / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{directory} has no tokenizer.json; only token ids can be used with it")
        return cls.from_file(path)

    @classmethod
    def from_file(cls, path: Path) -> Tokenizer:
        """Reads a `tokenizer.json`."""
        try:
            definition = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise TokenizerError(f"{path} is not JSON: {error}") from error
        return cls(definition)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text. No control token comes out, whatever the text spells.

        Raises:
          TokenizerError: the text holds a lone surrogate.
        """
        if len(text) < _CACHED_FROM:
            return self._encode(text)
        with self._lock:
            known = self._cache.get(text)
            if known is not None:
                self._cache.move_to_end(text)
                return known.tolist()
        ids = self._encode(text)
        if len(text) <= self._cache_characters:
            with self._lock:
                if text not in self._cache:
                    self.cached_characters += len(text)
                self._cache[text] = array("i", ids)
                while self.cached_characters > self._cache_characters:
                    self.cached_characters -= len(self._cache.popitem(last=False)[0])
        return ids

    def encode_with_control(self, text: str) -> list[int]:
        """Ids of a raw prompt in which literals of control tokens, and of all added tokens, mean those tokens.

        For prompts that are trusted to be complete, never for a part written by somebody else.
        """
        self._require_text(text)
        found = self._splitter.encode(text, add_special_tokens=False)
        ids: list[int] = []
        for token, (start, end) in zip(found.tokens, found.offsets, strict=True):
            literal = text[start:end]
            ids += [self._added[token]] if token in self._added else self.encode(literal)
        return ids

    def control_id(self, token: str) -> int:
        """Id of a control token given as its literal.

        Raises:
          KeyError: no such token.
        """
        return self._added[token]

    def is_control(self, token_id: int) -> bool:
        """Whether an id is a control or other added token, which plain text never encodes to."""
        return token_id in self._added_ids

    def is_hidden(self, token_id: int) -> bool:
        """Whether `skip_special` leaves an id out.

        Hidden are turn, task, image, begin, end and padding tokens and whatever the file calls special. `<think>`,
        `</think>` and `｜DSML｜` are markup that belongs to the text and stay.
        """
        return token_id in self._hideable

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of one id, possibly a part of a character; empty for ids the vocabulary leaves unused.

        Raises:
          IndexError: the id is negative or not below `vocab_size`.
        """
        if not 0 <= token_id < self.vocab_size:
            raise IndexError(f"token id {token_id} is outside 0..{self.vocab_size - 1}")
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """Text of one id; U+FFFD stands where it holds a part of a character."""
        return self.token_bytes(token_id).decode(errors="replace")

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of ids; bytes that form no character become U+FFFD."""
        kept = (self.token_bytes(token_id) for token_id in ids if not (skip_special and self.is_hidden(token_id)))
        return b"".join(kept).decode(errors="replace")

    def detokenizer(self, *, skip_special: bool = False, stop: Sequence[str] = ()) -> Detokenizer:
        """Text of one generation as it arrives; stop tokens are always left out (see `Detokenizer`)."""
        return Detokenizer(self, skip_special=skip_special, stop=stop, dropped=self.stop_ids)

    def _encode(self, text: str) -> list[int]:
        self._require_text(text)
        ids: list[int] = self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    @staticmethod
    def _require_text(text: str) -> None:
        surrogate = unencodable(text)
        if surrogate is not None:
            raise TokenizerError(f"the lone surrogate {surrogate} is not text and has no token ids")


def _check(definition: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The added tokens and the vocabulary of a byte-level BPE definition."""
    model = definition.get("model") or {}
    decoder = definition.get("decoder") or {}
    kinds = [decoder.get("type"), *(part.get("type") for part in decoder.get("decoders", ()))]
    if model.get("type") != "BPE" or "ByteLevel" not in kinds:
        found = f"{model.get('type')} with decoder {decoder.get('type')}"
        raise TokenizerError(f"a byte-level BPE tokenizer is needed, this one is {found}")
    return list(definition.get("added_tokens", ())), dict(model["vocab"])


def _byte_table(vocab: Mapping[str, int], added: Mapping[str, int]) -> list[bytes]:
    """Bytes of every id: BPE pieces through the byte-level alphabet, added tokens as their UTF-8."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable} | {chr(256 + k): byte for k, byte in enumerate(others)}
    table = [b""] * (max(max(vocab.values()), max(added.values())) + 1)
    added_ids = frozenset(added.values())
    for piece, token_id in vocab.items():
        if token_id not in added_ids:
            table[token_id] = bytes(alphabet[character] for character in piece)
    for literal, token_id in added.items():
        table[token_id] = literal.encode()
    return table


def _splitter(added: Iterable[Mapping[str, Any]]) -> LibraryTokenizer:
    """A tokenizer that only finds added tokens: everything between two of them is one unknown word."""
    splitter = LibraryTokenizer(WordLevel({"": 0}, unk_token=""))
    options = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for special, add in ((True, splitter.add_special_tokens), (False, splitter.add_tokens)):
        chosen = [token for token in added if token["special"] is special]
        add([AddedToken(token["content"], **{option: token[option] for option in options}) for token in chosen])
    return splitter
