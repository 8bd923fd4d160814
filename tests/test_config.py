"""The released configuration: every key, every rule, all faults at once, and the topology it describes."""

import copy
import dataclasses
import json
from pathlib import Path

import pytest

from v41jax.config import CandidateRole, ConfigError, LayerMode, ModelConfig, TextConfig
from v41jax.presets import PRESETS, preset, preset_dict

GOLDEN = Path(__file__).parent / "golden"


def faults_after(change, name="v4.1-flash"):
    root = preset_dict(name)
    change(root)
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(root)
    return list(caught.value.faults)


def set_text(**values):
    return lambda root: root["text_config"].update(values)


def set_yarn(**values):
    return lambda root: root["text_config"]["rope_scaling"].update(values)


def set_ratio(layer, ratio):
    return lambda root: root["text_config"]["compress_ratios"].__setitem__(layer, ratio)


def drop(section, key):
    return lambda root: (root[section] if section else root).pop(key)


BROKEN = {
    "v4 model type": (lambda r: r.update(model_type="deepseek_v4"), "model_type is 'deepseek_v4'"),
    "v4 architecture": (lambda r: r.update(architectures=["DeepseekV4ForCausalLM"]), "architectures is"),
    "no architecture": (drop("", "architectures"), "architectures is missing"),
    "text model type": (set_text(model_type="deepseek_v4"), "text_config.model_type is 'deepseek_v4'"),
    "no text": (drop("", "text_config"), "text_config is missing"),
    "no vision": (drop("", "vision_config"), "vision_config is missing"),
    "no quantization": (drop("", "quantization_config"), "quantization_config is missing"),
    "quant method": (lambda r: r["quantization_config"].update(quant_method="awq"), "quant_method is 'awq'"),
    "weight block": (
        lambda r: r["quantization_config"].update(weight_block_size=[128, 128]),
        "weight_block_size is [128, 128], must be [32, 32]",
    ),
    "scale format": (lambda r: r["quantization_config"].update(scale_fmt="float"), "scale_fmt is 'float'"),
    "activation scheme": (lambda r: r["quantization_config"].update(activation_scheme="static"), "activation_scheme"),
    "expert dtype": (lambda r: r["quantization_config"].update(expert_dtype="bf16"), "expert_dtype is 'bf16'"),
    "unknown quantization key": (lambda r: r["quantization_config"].update(zero_point=1), "zero_point is not a known"),
    "root token": (drop("", "image_token_id"), "image_token_id is missing"),
    "token outside": (lambda r: r.update(image_token_id=129280), "image_token_id is 129280, must be below vocab_size"),
    "tied": (lambda r: r.update(tie_word_embeddings=True), "tie_word_embeddings is True"),
    "tied text": (set_text(tie_word_embeddings=True), "text_config.tie_word_embeddings is True"),
    "attention bias": (set_text(attention_bias=True), "attention_bias is True"),
    "missing key": (drop("text_config", "hc_mult"), "text_config.hc_mult is missing"),
    "old key": (set_text(first_k_dense_replace=3), "first_k_dense_replace is not a known key"),
    "misspelt key": (set_text(gate_tmp=2.0), "gate_tmp is not a known key"),
    "wrong type": (set_text(hidden_size="5120"), "hidden_size is '5120', must be a whole number"),
    "fraction": (set_text(sliding_window=128.5), "sliding_window is 128.5, must be a whole number"),
    "bool": (set_text(o_groups=True), "o_groups is True, must be a whole number"),
    "list type": (set_text(kv_source_layer_ids=[2, "8", 14, 20]), "kv_source_layer_ids is"),
    "zero": (set_text(sliding_window=0), "sliding_window is 0, must be at least 1"),
    "not finite": (set_text(swiglu_limit=float("nan")), "swiglu_limit is nan, must be finite"),
    "too many experts": (set_text(n_routed_experts=10**9), "n_routed_experts is 1000000000, must be at most 65536"),
    "ratio length": (set_text(num_hidden_layers=41), "compress_ratios has 43 entries, must have 44"),
    "ratio value": (set_ratio(5, 4), "compress_ratios[5] is 4, must be 0, 1 or 2"),
    "draft ratio": (set_ratio(41, 1), "compress_ratios[41] is 1, must be 0: draft layers"),
    "source order": (set_text(kv_source_layer_ids=[2, 14, 8, 20]), "kv_source_layer_ids has 8 after 14"),
    "source twice": (
        set_text(index_source_layer_ids=[2, 8, 8, 14, 20, 24, 28, 32, 36]),
        "index_source_layer_ids has 8 after 8",
    ),
    "source range": (
        set_text(index_source_layer_ids=[2, 8, 14, 20, 24, 28, 32, 40]),
        "index_source_layer_ids names layer 40, must lie in 0..39",
    ),
    "kv source without index": (
        set_text(index_source_layer_ids=[2, 14, 20, 24, 28, 32, 36]),
        "kv_source_layer_ids names layer 8, which is missing from index_source_layer_ids",
    ),
    "window source": (
        set_text(kv_source_layer_ids=[1, 2, 8, 14, 20], index_source_layer_ids=[1, 2, 8, 14, 20, 24, 28, 32, 36]),
        "kv_source_layer_ids names layer 1, whose compress ratio is 0",
    ),
    "no owner": (
        set_text(kv_source_layer_ids=[8, 14, 20], index_source_layer_ids=[8, 14, 20, 24, 28, 32, 36]),
        "layer 2 has compress ratio 2, but no KV source at or before it",
    ),
    "owner of another ratio": (
        set_text(kv_source_layer_ids=[2, 8, 14]),
        "layer 20 has compress ratio 1, but its KV source, layer 14, has 2",
    ),
    "stale selection": (
        set_text(index_source_layer_ids=[2, 8, 20, 24, 28, 32, 36]),
        "layer 14 would use the selection of layer 8, made before its KV source, layer 14",
    ),
    "candidate source": (set_text(candidate_source_layer_id=21), "candidate_source_layer_id is 21, must be -1 or one"),
    "candidate blocks": (set_text(candidate_topk_blocks=0), "candidate_topk_blocks is 0, must be at least 1"),
    "candidate size": (set_text(candidate_block_size=0), "candidate_block_size is 0, must be at least 1"),
    "candidate room": (set_text(candidate_topk_blocks=63), "= 504 entries, fewer than index_topk 512"),
    "candidates of two owners": (set_text(candidate_source_layer_id=14), "names layer 20 after the candidate source"),
    "kv heads": (set_text(num_key_value_heads=8), "num_key_value_heads is 8, must be 1"),
    "shared experts": (set_text(n_shared_experts=2), "n_shared_experts is 2, must be 1"),
    "router": (set_text(scoring_func="tanh"), "scoring_func is 'tanh'"),
    "experts chosen": (set_text(num_experts_per_tok=385), "num_experts_per_tok is 385, must be at most"),
    "output groups": (set_text(o_groups=7), "num_attention_heads is 64, must be a multiple of o_groups 7"),
    "odd rope": (set_text(qk_rope_head_dim=63), "qk_rope_head_dim is 63, must be even"),
    "wide rope": (set_text(qk_rope_head_dim=130), "qk_rope_head_dim is 130, must be even, above 0 and at most 128"),
    "rope type": (set_yarn(rope_type="linear"), "rope_scaling.rope_type is 'linear', must be 'yarn'"),
    "yarn factor": (set_yarn(factor=0.5), "rope_scaling.factor is 0.5, must be at least 1"),
    "yarn mscale": (set_yarn(mscale=1.0), "rope_scaling.mscale is not a known key"),
    "yarn missing": (lambda r: r["text_config"]["rope_scaling"].pop("beta_slow"), "rope_scaling.beta_slow is missing"),
    "yarn order": (set_yarn(beta_slow=64), "must be beta_fast > beta_slow"),
    "eps": (set_text(rms_norm_eps=0.0), "rms_norm_eps is 0.0, must be above 0"),
    "quantizer block": (set_text(q_lora_rank=1290), "q_lora_rank is 1290, must be a multiple of 32"),
    "engram order": (set_text(engram_layer_ids=[14, 1]), "engram_layer_ids has 1 after 14"),
    "engram range": (set_text(engram_layer_ids=[1, 40]), "engram_layer_ids names layer 40"),
    "engram rows": (set_text(engram_num_embeddings=[384006168]), "engram_num_embeddings has 1 entries for 2"),
    "engram primes": (
        set_text(engram_num_embeddings=[384006168, 384016683]),
        "states 384016683 rows for layer 14, the primes from engram_vocab_size 16000000 add up to 384016682",
    ),
    "engram start": (set_text(engram_vocab_size=2**31), "engram_vocab_size is 2147483648, must be below"),
    "engram block": (set_text(engram_head_dim=250), "engram_head_dim is 250, must be a multiple of 32"),
    "compressed": (set_text(engram_compressed_vocab_size=129281), "must be at most vocab_size 129280"),
    "draft targets": (set_text(dspark_target_layer_ids=[37, 38, 40]), "dspark_target_layer_ids names layer 40"),
    "draft experts": (set_text(dspark_num_experts_per_tok=129), "dspark_num_experts_per_tok is 129"),
    "noise token": (set_text(dspark_noise_token_id=129280), "dspark_noise_token_id is 129280"),
    "vision heads": (lambda r: r["vision_config"].update(num_attention_heads=15), "vision_config.hidden_size is 1024"),
    "vision activation": (
        lambda r: r["vision_config"].update(projector_hidden_act="relu"),
        "vision_config.projector_hidden_act is 'relu', must be 'gelu' or 'gelu_pytorch_tanh'",
    ),
    "vision key": (drop("vision_config", "patch_size"), "vision_config.patch_size is missing"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_each_broken_rule_names_its_value(case):
    change, message = BROKEN[case]
    faults = faults_after(change)
    assert any(message in fault for fault in faults), faults
    assert all("\n" not in fault for fault in faults)


def test_all_faults_are_reported_together():
    cases = ["quant method", "missing key", "draft ratio", "odd rope", "engram primes", "vision heads", "token outside"]

    def everything(root):
        for case in cases:
            BROKEN[case][0](root)

    faults = faults_after(everything)
    for case in cases:
        assert any(BROKEN[case][1] in fault for fault in faults), (case, faults)
    assert len(faults) == len(cases)


def test_an_empty_object_is_refused_in_full():
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict({})
    assert len(caught.value.faults) == 9


@pytest.mark.parametrize("root", [[], None, "x", {"text_config": [], "vision_config": 3, "quantization_config": None}])
def test_any_json_value_gives_faults_and_nothing_else(root):
    with pytest.raises(ConfigError):
        ModelConfig.from_dict(root)


@pytest.mark.parametrize("key", [field.name for field in dataclasses.fields(TextConfig)])
@pytest.mark.parametrize("value", [None, -7, 0, 3.5, "x", [], [[]], {}, 2**70])
def test_any_value_of_any_key_gives_a_config_or_a_config_error(key, value):
    root = preset_dict("pico")
    root["text_config"][key] = value
    try:
        ModelConfig.from_dict(root)
    except ConfigError as error:
        assert any(key in fault or "layer" in fault or "hash" in fault for fault in error.faults)


def test_golden_configs_parse():
    pico = ModelConfig.from_file(GOLDEN / "pico" / "config.json")
    # The golden data were recorded with another activation of the aligner than the released one.
    vision = dataclasses.replace(preset("pico").vision, projector_hidden_act="gelu_pytorch_tanh")
    assert pico == dataclasses.replace(preset("pico"), vision=vision)
    assert pico.to_dict()["vision_config"]["projector_hidden_act"] == "gelu_pytorch_tanh"
    assert pico.text.rope_scaling.factor == 16.0 and pico.text.gate_temp == 1.0 and pico.vision.max_wh_ratio is None
    five = ModelConfig.from_file(GOLDEN / "five-layer")
    assert [layer.mode.name for layer in five.layers] == ["WINDOW", "FULL", "REUSE", "FULL", "REUSE"]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid_and_survive_the_round_trip(name):
    config = preset(name)
    root = json.loads(json.dumps(config.to_dict()))
    assert ModelConfig.from_dict(root) == config
    assert {layer.mode for layer in config.layers} == set(LayerMode)
    assert {layer.candidates for layer in config.layers} == set(CandidateRole)


def test_the_released_form_is_written_with_every_key():
    written, released = preset("v4.1-flash").to_dict(), preset_dict("v4.1-flash")
    for section in ("text_config", "vision_config", "quantization_config"):
        assert written[section] == released[section]
    assert len(written["text_config"]) == 59  # model_type and the 58 further known keys
    assert {key for key in released} == set(written)


def test_released_topology():
    config = preset("v4.1-flash")
    layers = config.layers
    assert [len([x for x in layers if x.mode is mode]) for mode in LayerMode] == [2, 4, 4, 30]
    assert config.owners == ((2, 2), (8, 2), (14, 2), (20, 1))
    assert [(x.kv_owner, x.topk_owner) for x in layers[19:25]] == [
        (14, 14),
        (20, 20),
        (20, 20),
        (20, 20),
        (20, 20),
        (20, 24),
    ]
    assert [x.index for x in layers if x.candidates is CandidateRole.CONSUMES] == [24, 28, 32, 36]
    assert [x.index for x in layers if x.candidates is CandidateRole.PUBLISHES] == [20]
    assert [(x.index, x.engram) for x in layers if x.engram is not None] == [(1, 0), (14, 1)]
    assert layers[0].mode is LayerMode.WINDOW and layers[0].kv_owner is None and layers[39].topk_owner == 36


def test_candidates_may_be_switched_off():
    root = preset_dict("v4.1-flash")
    root["text_config"].update(candidate_source_layer_id=-1, candidate_topk_blocks=0, candidate_block_size=0)
    assert all(layer.candidates is CandidateRole.NONE for layer in ModelConfig.from_dict(root).layers)


def test_a_model_without_engram_or_draft_is_legal():
    root = preset_dict("pico")
    root["text_config"].update(
        engram_layer_ids=[],
        engram_num_embeddings=[],
        num_nextn_predict_layers=0,
        compress_ratios=root["text_config"]["compress_ratios"][:12],
    )
    assert all(layer.engram is None for layer in ModelConfig.from_dict(root).layers)


def test_from_file_names_what_is_wrong_with_the_file(tmp_path):
    path = tmp_path / "config.json"
    for content, message in (
        (b"{", "not a JSON file"),
        (b'{"a":1,"a":2}', "'a' appears twice"),
        (b"\xff", "not a JSON"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            ModelConfig.from_file(tmp_path)
    with pytest.raises(FileNotFoundError):
        ModelConfig.from_file(tmp_path / "absent.json")


def test_parallelism_must_not_cut_a_unit():
    config = preset("v4.1-flash")
    config.check_parallelism(model=8, experts=64, shard_index_heads=True)
    with pytest.raises(ConfigError) as caught:
        config.check_parallelism(model=16, experts=5)
    assert "moe_intermediate_size is 2304: 144 on each of 16 chips cuts a block of 32" in str(caught.value)
    assert "o_groups is 8, not divisible over 16" in str(caught.value)
    assert "n_routed_experts is 384, not divisible over 5" in str(caught.value)


def test_presets_do_not_share_state():
    first = preset_dict("pico")
    first["text_config"]["compress_ratios"][0] = 9
    assert preset_dict("pico") == copy.deepcopy(preset_dict("pico")) != first
    with pytest.raises(ConfigError, match="'nano' does not exist; choose from"):
        preset("nano")
