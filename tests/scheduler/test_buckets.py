"""Shape ladders."""

import dataclasses

import pytest

from scheduler.buckets import Buckets, decode_ladder, powers_ladder, prefill_token_ladder
from scheduler.pool_geometry import V41PoolGeometry
from scheduler.runtime_config import EngineConfig

GEOMETRY = V41PoolGeometry(
    layers=12, owners=((2, 2), (4, 2), (6, 1)), block_size=32, window_size=16, head_dim=64, index_dim=32
)


def test_decode_ladder_ends_at_the_request_limit():
    assert decode_ladder(256) == (1, 2, 4, 8, 16, 32, 48, 64, 128, 256)
    assert decode_ladder(1) == (1,)
    assert decode_ladder(5) == (1, 2, 4, 5)
    assert decode_ladder(512)[-2:] == (256, 512)
    assert decode_ladder(600)[-2:] == (512, 600)


def test_prefill_rows_double_up_to_the_budget():
    assert prefill_token_ladder(16384) == (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    assert prefill_token_ladder(64) == (128,)
    assert prefill_token_ladder(200) == (128, 256)
    assert prefill_token_ladder(2100)[-2:] == (2048, 2176)


def test_powers_end_exactly_at_the_top():
    assert powers_ladder(100, 4, 4) == (4, 16, 64, 100)
    assert powers_ladder(3, 4, 4) == (3,)
    assert powers_ladder(1, 1, 4) == (1,)


def test_default_ladders_hold_the_largest_step():
    config = EngineConfig(kv_cache_block_size=32, max_num_seqs=6, max_num_batched_tokens=300)
    buckets = Buckets.default(config, GEOMETRY, 50, 1000)
    assert buckets.decode_requests == (1, 2, 4, 6)
    assert buckets.prefill_rows == (128, 256, 384)
    assert buckets.prefill_requests == (6, 6, 6)
    assert buckets.prefill_pages == (16, 32)
    assert buckets.decode_pages == (32,)
    assert Buckets.default(config, GEOMETRY, 20, 1000).decode_pages == (20,)


def test_unordered_ladders_are_refused():
    with pytest.raises(ValueError, match="prefill_rows"):
        Buckets((1,), (256, 128), (1, 1), (1,), (1,))
    with pytest.raises(ValueError, match="one entry for each"):
        Buckets((1,), (128, 256), (1,), (1,), (1,))
    with pytest.raises(ValueError, match="decode_pages"):
        Buckets((1,), (128,), (1,), (1,), ())


def test_the_largest_rows_hold_every_request():
    config = EngineConfig(kv_cache_block_size=32, max_num_seqs=200, max_num_batched_tokens=1024)
    buckets = Buckets.default(config, GEOMETRY, 50, 1000)
    assert list(zip(buckets.prefill_rows, buckets.prefill_requests)) == [(128, 8), (256, 16), (512, 32), (1024, 200)]


def test_the_shapes_listed_are_few_and_all_distinct():
    config = EngineConfig(max_num_seqs=512, max_num_batched_tokens=16384)
    geometry = dataclasses.replace(GEOMETRY, block_size=128)
    shapes = Buckets.default(config, geometry, 100_000, 1 << 20).shapes(True)
    assert len(set(shapes)) == len(shapes) <= 140
