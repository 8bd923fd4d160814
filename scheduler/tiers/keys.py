"""Names of pages outside the device: everything their bytes depend on, hashed to 32 bytes.

A name chains the content of all blocks up to the page, as the hashes of `scheduler.pages` do, but starts from the
identity of the model, its tokens and the bytes' layout. With 256 bits equal names mean equal content: nothing is
compared on a lookup, and replicas that share a store never mix models.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json

from scheduler.pages import block_content
from scheduler.sequence import Sequence

KEY_BYTES = 32


@dataclasses.dataclass(frozen=True)
class CacheIdentity:
    """What the bytes of a page depend on besides the tokens.

    Attributes:
      model: identity of the weights and the configuration.
      tokens: identity of the tokenizer and the compressed token map.
      layout_id: identity of the transferred bytes.
      computation: options that change values without changing the layout: dtype, quantization, replay.
    """

    model: str
    tokens: str
    layout_id: str
    computation: str

    @property
    def namespace(self) -> bytes:
        """32 bytes; equal only for equal identities."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest()


def page_keys(namespace: bytes, sequence: Sequence, blocks: int, block_size: int) -> list[bytes]:
    """Names of the first `blocks` pages of a request, memoised on it.

    Raises:
      RuntimeError: when a block holds a token that is not finalized.
    """
    if blocks * block_size > sequence.num_finalized_tokens:
        raise RuntimeError(
            f"request {sequence.request_id!r}: {blocks} blocks of {block_size} tokens reach past its "
            f"{sequence.num_finalized_tokens} finalized tokens"
        )
    keys = sequence.cache_keys
    while len(keys) < blocks:
        parent = keys[-1] if keys else namespace
        content = block_content(sequence, len(keys), block_size)
        keys.append(hashlib.blake2b(parent + content, digest_size=KEY_BYTES).digest())
    return keys[:blocks]


def image_keys(page_key: bytes, segments: int) -> list[bytes]:
    """Names of the pieces of the STATE image that stands after the page of that name."""
    return [
        hashlib.blake2b(page_key + b"state" + index.to_bytes(4, "little"), digest_size=KEY_BYTES).digest()
        for index in range(segments)
    ]
