"""A page as it lies in a file or in a shared store: its name, its length and a checksum before its bytes.

A record that was cut short, changed by a bit, or filed under another name is recognised and never used.
"""

from __future__ import annotations

import hashlib
import struct

from scheduler.tiers.keys import KEY_BYTES

_MAGIC = b"V41PAGE1"
_CHECKSUM_BYTES = 16
_HEADER = struct.Struct(f"<{len(_MAGIC)}s{KEY_BYTES}sQ{_CHECKSUM_BYTES}s")
HEADER_BYTES = _HEADER.size


class CorruptRecordError(ValueError):
    """Bytes that are not the record that was written."""


def encode_record(key: bytes, payload: bytes) -> bytes:
    """The record of a page of that name."""
    return _HEADER.pack(_MAGIC, key, len(payload), _checksum(key, payload)) + payload


def decode_record(key: bytes, record: bytes, length: int) -> bytes:
    """The page in a record.

    Args:
      key: name it was asked for by.
      record: what the store returned.
      length: bytes that a page has.

    Raises:
      CorruptRecordError: it says what is wrong with the record.
    """
    if len(record) != HEADER_BYTES + length:
        raise CorruptRecordError(f"a record has {len(record)} bytes, not {HEADER_BYTES + length}")
    magic, name, stated, checksum = _HEADER.unpack_from(record)
    payload = record[HEADER_BYTES:]
    if magic != _MAGIC:
        raise CorruptRecordError(f"a record begins with {magic!r}, not {_MAGIC!r}")
    if name != key:
        raise CorruptRecordError(f"the record of {name.hex()} lies under {key.hex()}")
    if stated != length:
        raise CorruptRecordError(f"a record states {stated} bytes, not {length}")
    if checksum != _checksum(key, payload):
        raise CorruptRecordError(f"the checksum of {key.hex()} is wrong")
    return payload


def _checksum(key: bytes, payload: bytes) -> bytes:
    digest = hashlib.blake2b(payload, key=key, digest_size=_CHECKSUM_BYTES)
    return digest.digest()
