"""Pages in a store that replicas share, over the Redis protocol (Redis, Valkey and what speaks like them).

How much the store keeps and what it evicts is the store's own setting (`maxmemory`, `maxmemory-policy allkeys-lru`).
Every operation has a deadline; none is repeated, because computing the page again is always possible.
"""

from __future__ import annotations

from typing import Any

from scheduler.tiers.records import decode_record, encode_record


class SharedTier:
    """Thread-safe.

    Attributes:
      name: "shared".
    """

    name = "shared"

    def __init__(self, url: str, timeout_s: float, namespace: bytes):
        """Makes a client; the store need not answer yet.

        Args:
          url: `redis://host:port/db` and the like.
          timeout_s: of connecting and of every operation.
          namespace: prefix of all names.

        Raises:
          ValueError: the package `redis` is missing, or the address is malformed.
        """
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ModuleNotFoundError as error:
            raise ValueError(
                "shared_cache_url needs the package 'redis': install v41jax[tiers], or leave it unset"
            ) from error
        address = url.replace("valkey", "redis", 1) if url.startswith("valkey") else url
        self._failure: type[Exception] = redis.RedisError
        self._prefix = f"v41jax:{namespace.hex()[:32]}:".encode()
        self._client: Any = redis.Redis.from_url(
            address, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 0), protocol=2
        )

    def contains(self, key: bytes) -> bool:
        """Whether the store holds the name now.

        Raises:
          OSError: the store did not answer in time, or with an error.
        """
        return bool(self._call("exists", key))

    def get(self, key: bytes, length: int) -> bytes | None:
        """The page; None without one.

        Raises:
          CorruptRecordError: the store does not hold what was written.
          OSError: the store did not answer in time, or with an error.
        """
        record = self._call("get", key)
        return None if record is None else decode_record(key, bytes(record), length)

    def put(self, key: bytes, payload: bytes) -> int:
        """Writes a page; always 0, the store evicts by itself.

        Raises:
          OSError: the store did not answer in time, or with an error (it is full and evicts nothing).
        """
        self._call("set", key, encode_record(key, payload))
        return 0

    def discard(self, key: bytes) -> None:
        """Removes a page.

        Raises:
          OSError: the store did not answer in time, or with an error.
        """
        self._call("delete", key)

    def usage(self) -> tuple[int, int]:
        """(0, 0): what the store holds is the store's to tell."""
        return 0, 0

    def close(self) -> None:
        """Closes the connections; the pages stay."""
        self._client.close()

    def _call(self, operation: str, key: bytes, *values: bytes) -> Any:
        try:
            return getattr(self._client, operation)(self._prefix + key, *values)
        except self._failure as error:
            raise OSError(f"shared store: {type(error).__name__}: {error}") from error
