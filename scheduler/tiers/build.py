"""The tiers that options ask for."""

from __future__ import annotations

from scheduler.runtime_config import EngineConfig
from scheduler.tiers.disk import DiskTier
from scheduler.tiers.host import HostTier
from scheduler.tiers.keys import CacheIdentity
from scheduler.tiers.layout import TransferLayout
from scheduler.tiers.shared import SharedTier
from scheduler.tiers.store import Tier, TierStore


def open_store(config: EngineConfig, layout: TransferLayout, identity: CacheIdentity) -> TierStore | None:
    """Opens host, disk and shared tiers, in this order; None when no option asks for one.

    Raises:
      ValueError: a directory or the shared store's client cannot be used; what was opened is closed.
    """
    tiers: list[Tier] = []
    try:
        if config.host_cache_bytes:
            tiers.append(HostTier(config.host_cache_bytes))
        if config.disk_cache_dir is not None:
            tiers.append(DiskTier(config.disk_cache_dir, config.disk_cache_bytes, identity.namespace))
        if config.shared_cache_url is not None:
            tiers.append(SharedTier(config.shared_cache_url, config.shared_cache_timeout, identity.namespace))
    except BaseException:
        for tier in tiers:
            tier.close()
        raise
    return TierStore(tiers, layout.unit_bytes) if tiers else None
