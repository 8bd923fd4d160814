"""Random checkpoints: reproducible, loadable, never larger in memory than a chunk, with weights of a useful size."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from checkpoints import synthesize as module
from checkpoints.errors import CheckpointError
from checkpoints.load import Checkpoint
from checkpoints.schema import SCOPES, Role
from checkpoints.synthesize import packaged_tokenizer, random_token_map, synthesize
from checkpoints.verify import verify
from v41jax.config import ModelConfig
from v41jax.presets import preset, preset_dict
from v41jax.quantization_numpy import dequantize_dense, dequantize_expert, dequantize_rows
from v41jax.reference import ReferenceModel

ROOT = Path(__file__).resolve().parents[2]


def contents(directory, scopes=SCOPES):
    with Checkpoint.open(directory, scopes) as checkpoint:
        return {name: checkpoint.tensor(name).tobytes() for name in checkpoint.names}


@pytest.fixture(scope="module")
def pico(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pico")
    synthesize(directory, preset("pico"), seed=7)
    return directory


@pytest.mark.parametrize("name", ["pico", "odd"])
def test_what_is_made_verifies(name, tmp_path):
    synthesize(tmp_path, preset(name), seed=1, shard_bytes=2**20)
    assert verify(tmp_path).faults == ()
    assert ModelConfig.from_file(tmp_path) == preset(name)


def test_seed_and_name_decide_a_tensor_and_nothing_else_does(pico, tmp_path):
    first = contents(pico)
    synthesize(tmp_path / "shards", preset("pico"), seed=7, shard_bytes=300_000)
    assert contents(tmp_path / "shards") == first
    synthesize(tmp_path / "draft", preset("pico"), seed=7, scopes=["draft"])
    draft = contents(tmp_path / "draft", ["draft"])
    assert draft == {name: first[name] for name in draft}
    synthesize(tmp_path / "other", preset("pico"), seed=8)
    other = contents(tmp_path / "other")
    long = [name for name, data in first.items() if len(data) >= 64 and not name.endswith(".scale")]
    assert len(long) > 500 and all(other[name] != first[name] for name in long)
    assert len({first[name] for name in long}) == len(long)


def test_chunks_do_not_change_the_tensors(pico, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 1024)
    synthesize(tmp_path, preset("pico"), seed=7)
    assert contents(tmp_path) == contents(pico)


def test_weights_are_scaled_by_their_inputs(pico):
    checked = 0
    with Checkpoint.open(pico, SCOPES) as checkpoint:
        for name, spec in checkpoint.schema.items():
            if spec.role not in (Role.DENSE_WEIGHT, Role.EXPERT_WEIGHT, Role.TABLE_WEIGHT):
                continue
            codes, scales = checkpoint.tensor(name), checkpoint.tensor(name.removesuffix("weight") + "scale")
            if spec.role is Role.DENSE_WEIGHT:
                weight, expected = dequantize_dense(codes, scales), spec.shape[1] ** -0.5
            elif spec.role is Role.EXPERT_WEIGHT:
                weight, expected = dequantize_expert(codes, scales), (2 * spec.shape[1]) ** -0.5
            else:
                weight, expected = dequantize_rows(codes, scales), 1.0
            # A dense matrix has few blocks, and each block's scale is one of two powers of two.
            assert 0.6 < weight.std() / expected < 1.5, name
            assert abs(weight.mean()) < expected / 10
            checked += 1
    assert checked == 15 * 8 + 12 * 24 + 3 * 12 + 1 + 5 + 2 + 2  # dense, experts, projections, tables


def test_every_code_and_both_signs_occur(pico):
    with Checkpoint.open(pico) as checkpoint:
        packed = np.concatenate(
            [
                checkpoint.tensor(n).ravel()
                for n in checkpoint.names
                if n.endswith("w2.weight") and "experts." in n and "shared" not in n
            ]
        )
        assert np.unique(packed).size == 256
        codes = checkpoint.tensor("layers.1.engram.embed.weight").view(np.uint8)
        assert np.unique(codes).size == 64
        scales = np.concatenate([checkpoint.tensor(n).ravel() for n in checkpoint.names if n.endswith(".scale")])
        assert np.unique(scales).size >= 4 and not (scales == 255).any()


def test_plain_tensors_keep_the_model_lively(pico):
    with Checkpoint.open(pico, SCOPES) as checkpoint:

        def moments(name):
            values = checkpoint.tensor(name).astype(np.float64)
            return values.mean(), values.std()

        assert moments("embed.weight") == pytest.approx((0, 1), abs=0.02)
        assert moments("head.weight") == pytest.approx((0, 2 * 128**-0.5), abs=0.02)
        assert moments("layers.5.attn_norm.weight") == pytest.approx((1, 0.1), abs=0.05)
        assert moments("layers.2.attn.indexer.k_norm.weight")[0] == pytest.approx(1, abs=0.1)
        assert moments("layers.0.ffn.gate.weight")[1] == pytest.approx(1.5 * 128**-0.5, rel=0.1)
        assert moments("layers.7.hc_ffn_fn")[1] == pytest.approx(512**-0.5, rel=0.05)
        bias, image_bias = (checkpoint.tensor(f"layers.3.ffn.gate.{leaf}") for leaf in ("bias", "bias_vl"))
        assert (bias != 0).all() and (bias != image_bias).all() and np.abs(bias).max() < 0.5
        sinks = np.concatenate([checkpoint.tensor(f"layers.{i}.attn.attn_sink") for i in range(12)])
        assert sinks.std() == pytest.approx(1, abs=0.25)
        mix = np.mean([checkpoint.tensor(f"layers.{i}.hc_attn_base")[8:].reshape(4, 4) for i in range(12)], axis=0)
        assert (np.diag(mix) > mix[~np.eye(4, dtype=bool)].max()).all()


def test_a_token_map_stands_in_for_a_tokenizer(pico):
    token_map = json.loads((pico / "engram_token_map.json").read_text())
    assert token_map == random_token_map(512, 400, 7)
    assert len(token_map) == 512 and set(token_map) == set(range(400)) and token_map[:400] == list(range(400))
    assert not (pico / "tokenizer.json").exists()


def test_the_released_vocabulary_takes_its_tokenizer_instead(tmp_path):
    file = packaged_tokenizer()
    assert file is not None
    synthesize(tmp_path, preset("tiny"), scopes=["vision"], tokenizer=file)
    assert (tmp_path / "tokenizer.json").read_bytes() == file.read_bytes()
    assert not (tmp_path / "engram_token_map.json").exists()


def test_a_tokenizer_that_does_not_fit_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(CheckpointError, match="more than vocab_size 512"):
        synthesize(tmp_path / "a", preset("pico"), tokenizer=packaged_tokenizer())
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")
    with pytest.raises(CheckpointError, match="not a readable tokenizer"):
        synthesize(tmp_path / "a", preset("pico"), tokenizer=broken)
    assert not (tmp_path / "a").exists()


def test_no_engram_needs_no_token_map(tmp_path):
    root = preset_dict("pico")
    root["text_config"].update(engram_layer_ids=[], engram_num_embeddings=[])
    synthesize(tmp_path, ModelConfig.from_dict(root), scopes=["text"])
    assert not (tmp_path / "engram_token_map.json").exists()


MEMORY = """
    import sys
    sys.path.insert(0, {root!r})
    import numpy as np
    from checkpoints.engram_tables import EngramTables
    from checkpoints.load import Checkpoint
    from checkpoints.synthesize import synthesize
    from checkpoints.verify import verify
    from v41jax.config import ModelConfig
    from v41jax.presets import preset_dict

    def peak():
        line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    def grown(action):
        open("/proc/self/clear_refs", "w").write("5")
        before = peak()
        result = action()
        return result, peak() - before

    root = preset_dict("bench-small")
    root["text_config"]["n_routed_experts"] = 100
    config = ModelConfig.from_dict(root)
    directory = {directory!r}

    def load():
        with Checkpoint.open(directory, ("text", "draft", "vision")) as checkpoint:
            tables = EngramTables.open(checkpoint)
            kept = [np.array(checkpoint.tensor(name)) for name in checkpoint.names if ".engram.embed." not in name]
        tables.gather(0, np.arange(0, tables.rows[0], 97))
        tables.close()
        return sum(array.nbytes for array in kept)

    _, made = grown(lambda: synthesize(directory, config))
    kept, loaded = grown(load)
    result, verified = grown(lambda: verify(directory))
    print(made, loaded, kept, verified, result.nbytes, len(result.faults))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_memory_stays_far_below_the_checkpoint(tmp_path):
    program = textwrap.dedent(MEMORY).format(root=str(ROOT), directory=str(tmp_path / "model"))
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    made, loaded, kept, verified, total, faults = map(int, output.split())
    assert total > 290e6 and kept > 285e6 and faults == 0
    megabyte = 2**20
    assert made < 100 * megabyte
    assert loaded - kept < 200 * megabyte  # 128 MiB of pages may be resident, and the copies of one tensor
    assert verified < 100 * megabyte


def test_forty_layers_neither_die_nor_explode(tmp_path):
    root = preset_dict("pico")
    for key in (
        "num_hidden_layers",
        "compress_ratios",
        "kv_source_layer_ids",
        "index_source_layer_ids",
        "candidate_source_layer_id",
        "engram_layer_ids",
        "dspark_target_layer_ids",
    ):
        root["text_config"][key] = preset_dict("v4.1-flash")["text_config"][key]
    config = ModelConfig.from_dict(root)
    synthesize(tmp_path, config, seed=11, scopes=["text"])
    ids = np.random.default_rng(0).integers(0, 512, 24)
    with Checkpoint.open(tmp_path) as checkpoint, ReferenceModel(checkpoint) as model:
        output = model.forward(ids)
    sizes = [root_mean_square(layer.streams) for layer in output.layers]
    assert len(sizes) == 40 and min(sizes) > 0.8 and max(sizes) < 15
    for layer in output.layers:
        assert 0.1 < root_mean_square(layer.attention_output) < 2
        assert 0.3 < root_mean_square(layer.ffn_output) < 2
        assert layer.router_weights.min() > 0.01
        assert len(np.unique(layer.router_choices)) >= 6  # of 8, from 48 choices
        unit = layer.streams / np.linalg.norm(layer.streams, axis=-1, keepdims=True)
        likeness = np.einsum("nsd,ntd->st", unit, unit) / len(ids)
        assert likeness[~np.eye(4, dtype=bool)].min() < 0.97  # the streams have not become one
    assert output.logits.std() == pytest.approx(2, abs=0.2)
    assert len(np.unique(output.logits.argmax(axis=-1))) > 12


def root_mean_square(values):
    return float(np.sqrt(np.mean(np.square(values))))
