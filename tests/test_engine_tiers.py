"""Engines with pages beyond the device: restarts, other processes, identities, options and what is reported."""

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from checkpoints.load import Checkpoint
from scheduler.sequence import SamplingParams
from tests.helpers.redis_server import RedisServer
from tests.test_engine import CHECKPOINT, CONFIG
from v41jax.cache_identity import cache_identity, model_identity
from v41jax.engine import Engine, Prompt
from v41jax.server.metrics import Metrics

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
TOKENS = tuple(np.random.default_rng(0).integers(5, 200, 150).tolist())
IMAGES = {"state_checkpoint_interval_tokens": 32}


def engine(**options):
    return Engine.from_checkpoint(CHECKPOINT, dataclasses.replace(CONFIG, **IMAGES, **options), warm_up=False)


@pytest.fixture(scope="module")
def expected():
    with engine() as alone:
        return alone.generate([Prompt(TOKENS, GREEDY)])[0].tokens


def test_a_conversation_resumed_after_a_restart_hits_the_disk(tmp_path, expected):
    options = {"disk_cache_dir": str(tmp_path), "host_cache_bytes": 1 << 24}
    with engine(**options) as first:
        assert first.generate([Prompt(TOKENS, GREEDY)])[0].tokens == expected
        with pytest.raises(ValueError, match="in use by another process"):
            engine(**options)
    turn = (*TOKENS, *expected, *range(20, 60))
    with engine(**options) as restarted:
        again, resumed = (restarted.generate([Prompt(tokens, GREEDY)])[0] for tokens in (TOKENS, turn))
        assert (again.tokens, again.cached_tokens) == (expected, 128)
        assert resumed.cached_tokens >= 128
        statistics = restarted.statistics()
        assert statistics["tiers"]["disk"]["hits"] > 4
        assert (statistics["transfers"]["pages_adopted"], statistics["transfers"]["images_adopted"]) == (4, 1)
        samples = {
            (sample.name, sample.labels.get("tier")): sample.value
            for family in text_string_to_metric_families(Metrics(restarted.statistics).text().decode())
            for sample in family.samples
        }
        assert samples["v41jax_tier_hits_total", "disk"] == statistics["tiers"]["disk"]["hits"]
        assert samples["v41jax_transfer_pages_adopted_total", None] == 4
        assert {tier for name, tier in samples if name == "v41jax_tier_read_seconds_total"} == {"host", "disk"}
        published = restarted.get_kv_transfer_tensors()
        assert published["image_bytes"] == restarted.core.scheduler.geometry.image_bytes
    with engine(**options, cache_model_id="another") as other:
        assert other.generate([Prompt(TOKENS, GREEDY)])[0].cached_tokens == 0
    with engine() as without:
        uncached = without.generate([Prompt(turn, GREEDY)])[0]
        assert (uncached.tokens, uncached.cached_tokens) == (resumed.tokens, 0)


def test_another_process_shares_the_prefix(tmp_path, expected):
    """`v41jax generate` in a process of its own finds what this one wrote to the store."""
    with RedisServer(tmp_path) as server:
        with engine(shared_cache_url=server.url, shared_cache_timeout=10.0) as first:
            first.generate([Prompt(TOKENS, GREEDY)])
        requests = tmp_path / "requests.jsonl"
        requests.write_text(json.dumps({"tokens": TOKENS, "max_tokens": 6, "temperature": 0.0}))
        flags = []
        for field in dataclasses.fields(CONFIG):
            value = getattr(dataclasses.replace(CONFIG, **IMAGES), field.name)
            if value != field.default and field.name not in ("decode_buckets", "mesh", "activation_quantization"):
                name = field.name.replace("_", "-")
                flags += [f"--no-{name}"] if value is False else [f"--{name}", str(value)]
        command = [sys.executable, "-m", "v41jax", "generate", "--model", str(CHECKPOINT), "--prompts", str(requests)]
        command += ["--json", "--ignore-eos", "--no-activation-quantization", "--decode-buckets", "4", *flags]
        command += ["--shared-cache-url", server.url, "--shared-cache-timeout", "10", "--cache-fetch-timeout", "60"]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout.splitlines()[-1])
        assert result["cached_tokens"] == 128
        assert tuple(result["tokens"])[: len(expected)] == expected


def test_identities_differ_by_weights_tokens_and_arithmetic(tmp_path):
    geometry = CONFIG.geometry
    with engine() as built, Checkpoint.open(CHECKPOINT) as checkpoint:
        geometry = built.core.runner.setup.geometry
        lookup = built.core._lookup
        identity = cache_identity(CONFIG, geometry, checkpoint, lookup)
        assert identity == cache_identity(CONFIG, geometry, checkpoint, lookup)
        for change in ({"dtype": "bfloat16"}, {"encoder_swa_bounded_replay": True}, {"cache_model_id": "mine"}):
            other = cache_identity(dataclasses.replace(CONFIG, **change), geometry, checkpoint, lookup)
            assert other.namespace != identity.namespace
        whole = model_identity(checkpoint)
    for name in ("config.json", "model.safetensors.index.json"):
        (tmp_path / name).write_bytes((CHECKPOINT / name).read_bytes())
    shards = sorted(CHECKPOINT.glob("*.safetensors"))
    for shard in shards:
        (tmp_path / shard.name).write_bytes(shard.read_bytes())
    with Checkpoint.open(tmp_path) as copied:
        assert model_identity(copied) == whole
        path, entry = copied.location(copied.names[len(copied.names) // 2])
    content = bytearray(path.read_bytes())
    for offset in range(entry.begin, entry.end, 256):
        content[offset] ^= 1
    path.write_bytes(content)
    with Checkpoint.open(tmp_path) as changed:
        assert model_identity(changed) != whole
