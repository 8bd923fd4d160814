"""Every refusal of the runtime specification, "Rejections before weights or pools load", by the option's name."""

import dataclasses
import json
import logging

import pytest

from scheduler.model_view import ModelView
from scheduler.runtime_config import EngineConfig, RuntimeConfigError, validate_runtime_config
from scheduler.states import TransferKind
from tests.helpers.golden import directory
from v41jax.config import ModelConfig

NATIVE = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "scale_fmt": "ue8m0",
    "weight_block_size": [32, 32],
    "expert_dtype": "fp4",
}
FLASH = ModelView(
    layers=40,
    owners=((2, 2), (8, 2), (14, 2), (20, 1)),
    layer_ratios=(),
    window_size=128,
    head_dim=512,
    index_dim=128,
    index_topk=512,
    history_size=3,
    engram_layers=(1, 14),
    image_token_id=129264,
    eos_token_ids=(1,),
    max_position=1_048_576,
    num_attention_heads=64,
    index_n_heads=64,
    o_groups=8,
    moe_intermediate_size=2304,
    n_routed_experts=384,
    draft_layers=3,
    draft_tokens=5,
    quantization=NATIVE,
)


def faults(view=FLASH, **options):
    try:
        validate_runtime_config(EngineConfig(**options), view)
    except RuntimeConfigError as error:
        return error.faults
    return ()


def test_the_defaults_are_served():
    assert faults() == ()


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_dtype": "fp4"},
        {"index_cache_dtype": "fp4"},
        {"encoder_swa_bounded_replay": False},
        {"decoder_swa_bounded_replay": False},
        {"kv_cache_block_size": 32, "encoder_swa_bounded_replay": False, "decoder_swa_bounded_replay": False},
        {"kv_cache_block_size": 160},
        {"max_num_batched_tokens": 256},
        {"long_prefill_token_threshold": 128},
        {"state_checkpoint_interval_tokens": -1},
        {"enforce_eager": True, "execution_mode": "PIECEWISE"},
        {"execution_mode": "PIECEWISE", "compile_level": 0},
        {"mesh": {"data": 1, "model": 4}},
        {"mesh": {"model": 4}, "enable_expert_parallel": True},
        {"decode_buckets": (1, 8, 64)},
        {"prompt_logprobs": True, "decoder_swa_bounded_replay": False},
        {"activation_quantization": False, "dtype": "float32"},
        {"host_cache_bytes": 1 << 30, "disk_cache_dir": "pages", "shared_cache_url": "valkeys://store:6379/1"},
        {"host_cache_bytes": 1 << 30, "encoder_swa_bounded_replay": False},
    ],
)
def test_accepted_options(options):
    assert faults(**options) == ()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype 'fp8'"),
        ({"index_cache_dtype": "bf16"}, "index_cache_dtype 'bf16'"),
        ({"kv_cache_block_size": 129}, "kv_cache_block_size 129 is odd"),
        ({"kv_cache_block_size": 144}, "kv_cache_block_size 144 must be a multiple of 32"),
        ({"kv_cache_block_size": 16}, "kv_cache_block_size 16 must be"),
        ({"kv_cache_block_size": 96, "decoder_swa_bounded_replay": False}, "encoder_swa_bounded_replay on"),
        ({"kv_cache_block_size": 96, "encoder_swa_bounded_replay": False}, "decoder_swa_bounded_replay on"),
        ({"kv_cache_block_size": 64, "encoder_swa_bounded_replay": False}, "decoder_swa_bounded_replay on"),
        ({"state_checkpoint_interval_tokens": -2}, "state_checkpoint_interval_tokens -2"),
        ({"state_checkpoint_interval_tokens": 100}, "state_checkpoint_interval_tokens 100"),
        ({"num_pages": 0}, "num_pages 0"),
        ({"mesh": {"data": 2}, "enforce_eager": True}, "enforce_eager runs on one device, the mesh has 2"),
        (
            {"mesh": {"model": 4}, "execution_mode": "PIECEWISE", "compile_level": 0},
            "execution_mode 'PIECEWISE' runs on one device, the mesh has 4",
        ),
        ({"host_cache_bytes": -1}, "host_cache_bytes -1"),
        ({"disk_cache_dir": "pages", "disk_cache_bytes": 0}, "disk_cache_bytes 0"),
        ({"shared_cache_url": "store:6379"}, "shared_cache_url must begin with"),
        ({"shared_cache_url": "http://store"}, "shared_cache_url must begin with"),
        ({"shared_cache_timeout": 0.0}, "shared_cache_timeout 0.0"),
        ({"cache_fetch_timeout": float("nan")}, "cache_fetch_timeout nan"),
        ({"host_cache_bytes": 1, "enable_prefix_caching": False}, "need enable_prefix_caching"),
        (
            {
                "disk_cache_dir": "pages",
                "encoder_swa_bounded_replay": False,
                "state_checkpoint_interval_tokens": 0,
            },
            "state_checkpoint_interval_tokens 0 keeps none",
        ),
        ({"memory_utilization": 0.0}, "memory_utilization 0.0"),
        ({"memory_utilization": 1.1}, "memory_utilization 1.1"),
        ({"kv_cache_dtype": "fp4", "activation_quantization": False}, "needs activation_quantization"),
        ({"max_num_batched_tokens": 255}, "max_num_batched_tokens 255 is below two pages"),
        ({"max_num_batched_tokens": 255, "encoder_swa_bounded_replay": False}, "max_num_batched_tokens 255"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens 0"),
        ({"long_prefill_token_threshold": 129}, "long_prefill_token_threshold 129"),
        ({"long_prefill_token_threshold": 64}, "long_prefill_token_threshold 64"),
        ({"long_prefill_token_threshold": 2048, "max_model_len": 1024}, "long_prefill_token_threshold 2048"),
        ({"max_num_seqs": 0}, "max_num_seqs 0"),
        ({"max_model_len": 1_048_577}, "max_model_len 1048577"),
        ({"max_model_len": 0}, "max_model_len 0"),
        ({"admission_delay_factor": -1.0}, "admission_delay_factor -1.0"),
        ({"admission_delay_factor": float("nan")}, "admission_delay_factor nan"),
        ({"memory_utilization": float("nan")}, "memory_utilization nan"),
        ({"decode_buckets": (4, 2)}, "decode_buckets [4, 2]"),
        ({"decode_buckets": (0, 2)}, "decode_buckets [0, 2]"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"export_hidden_states": True}, "export_hidden_states"),
        ({"mesh": {"model": 3}}, "tensor parallel size 3 does not divide num_attention_heads 64"),
        ({"mesh": {"model": 16}}, "tensor parallel size 16 does not divide o_groups 8"),
        ({"mesh": {"model": 512}, "enable_expert_parallel": True}, "expert parallel size 512"),
        ({"mesh": {"data": 5, "model": 2}, "enable_expert_parallel": True}, "expert parallel size 10 does not divide"),
        ({"mesh": {"data": 0, "model": 1}}, "mesh axis 'data' has size 0"),
        (
            {"mesh": {"data": 128}},
            "max_num_batched_tokens 128, the share of each of 128 data shards, is below two pages",
        ),
        ({"mesh": {"pipe": 1}}, "mesh axis 'pipe'"),
        ({"mesh": {"model": 0}}, "mesh axis 'model' has size 0"),
        ({"data_parallel_size": 2}, "data_parallel_size 2 is not supported: data shards are the mesh axis 'data'"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size 2"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size 2"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size 2"),
        ({"enable_dp_attention": True}, "enable_dp_attention"),
        ({"two_batch_overlap": True}, "two_batch_overlap"),
        ({"rapid_serve": True}, "rapid_serve"),
        ({"plugin_mode": True}, "plugin_mode"),
        ({"enable_eplb": True}, "enable_eplb"),
        ({"online_quantization": "int8"}, "online_quantization 'int8'"),
        ({"kv_transfer_connector": "nixl"}, "kv_transfer_connector 'nixl'"),
        ({"kv_transfer_connector": "lmcache_mp"}, "'lmcache_mp' is not available"),
        ({"execution_mode": "GRAPH"}, "execution_mode 'GRAPH'"),
        ({"execution_mode": "PIECEWISE", "compile_level": 3}, "'PIECEWISE' needs compile_level 0"),
        ({"compile_level": 2}, "compile_level 2"),
        ({"dtype": "float16"}, "dtype 'float16'"),
        ({"kernels": "cuda"}, "kernels 'cuda'"),
        ({"expert_exchange": "all"}, "expert_exchange 'all'"),
        ({"expert_exchange": "ragged"}, "'ragged' needs whole experts over several data shards, these are cut over 1"),
        (
            {"expert_exchange": "gather", "mesh": {"data": 2, "model": 1}},
            "'gather' needs whole experts over several data shards, these are cut over 2",
        ),
        (
            {"expert_exchange": "ragged", "mesh": {"data": 1, "model": 2}, "enable_expert_parallel": True},
            "'ragged' needs whole experts over several data shards, these are whole over 1",
        ),
        ({"max_num_seqs": 3, "mesh": {"data": 4, "model": 1}}, "max_num_seqs 3 is below the 4 data shards"),
        ({"num_speculative_tokens": 5}, "num_speculative_tokens 5 needs speculative_method"),
        ({"speculative_method": "eagle", "num_speculative_tokens": 5}, "speculative_method 'eagle'"),
        ({"speculative_method": "dspark"}, "num_speculative_tokens 0 is outside 1..5"),
        ({"speculative_method": "dspark", "num_speculative_tokens": 6}, "num_speculative_tokens 6 is outside 1..5"),
        (
            {"speculative_method": "dspark", "num_speculative_tokens": 5, "speculative_model": "x"},
            "the draft's weights",
        ),
        (
            {
                "speculative_method": "dspark",
                "num_speculative_tokens": 5,
                "execution_mode": "PIECEWISE",
                "compile_level": 0,
            },
            "keeps no features to draft from",
        ),
        ({"relaxed_acceptance": True}, "relaxed_acceptance"),
        ({"dynamic_verify_lengths": True}, "needs a calibration_profile"),
        ({"calibration_profile": "p.json"}, "without dynamic_verify_lengths"),
    ],
)
def test_refused_options_are_named(options, words):
    found = faults(**options)
    assert any(words in fault for fault in found), found


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quant_method", "awq"),
        ("scale_fmt", "float32"),
        ("activation_scheme", "static"),
        ("weight_block_size", [128, 128]),
        ("expert_dtype", "fp8"),
    ],
)
def test_foreign_checkpoint_quantization_is_refused(key, value):
    found = faults(dataclasses.replace(FLASH, quantization={**NATIVE, key: value}))
    assert len(found) == 1
    assert key in found[0]


def test_a_foreign_architecture_is_refused():
    assert "LlamaForCausalLM" in faults(dataclasses.replace(FLASH, architecture="LlamaForCausalLM"))[0]


def test_all_refusals_come_in_one_error():
    found = faults(
        kv_cache_dtype="fp8", max_num_seqs=0, compile_level=1, two_batch_overlap=True, pipeline_parallel_size=2
    )
    assert len(found) == 5


def test_the_interval_is_snapped_down_with_a_warning(caplog):
    config = EngineConfig(state_checkpoint_interval_tokens=8200)
    assert faults(state_checkpoint_interval_tokens=8200) == ()
    with caplog.at_level(logging.WARNING):
        assert config.checkpoint_interval() == 8192
    assert "8200" in caplog.text
    assert EngineConfig().checkpoint_interval() == 8192


def test_switches_choose_the_transfer():
    geometry = EngineConfig().geometry(FLASH)
    assert EngineConfig().transfer(geometry).kind is TransferKind.REPLAY
    assert EngineConfig(enable_prefix_caching=False).transfer(geometry).kind is TransferKind.NONE
    copy = EngineConfig(encoder_swa_bounded_replay=False).transfer(geometry)
    assert (copy.kind, copy.layout_id) == (TransferKind.COPY, geometry.layout_id)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"owners": ()}, "no layer owns"),
        ({"owners": ((2, 2), (39, 1))}, "no layer follows"),
        ({"engram_layers": (1, 20)}, "Engram layers"),
    ],
)
def test_decoder_replay_is_switched_off_with_a_reason_where_it_cannot_work(changes, words, caplog):
    view = dataclasses.replace(FLASH, **changes)
    with caplog.at_level(logging.WARNING):
        assert not EngineConfig().decoder_replay(view)
    assert words in caplog.text
    assert EngineConfig().min_final_prefill_rows(view) == 0
    assert EngineConfig().min_final_prefill_rows(FLASH) == 128
    assert EngineConfig(decoder_swa_bounded_replay=False).min_final_prefill_rows(FLASH) == 0


def test_geometry_follows_the_options():
    assert EngineConfig(kv_cache_dtype="fp4").geometry(FLASH).main_format == "fp4"
    assert EngineConfig(index_cache_dtype="fp4").geometry(FLASH).index_plane_format == "fp4"
    plain = EngineConfig(activation_quantization=False, dtype="float32").geometry(FLASH)
    assert (plain.main_format, plain.unquantized_dtype) == ("float", "float32")


def test_a_parsed_model_config_is_accepted():
    released = json.loads((directory("pico") / "config.json").read_text())
    config = ModelConfig.from_dict(released)
    view = ModelView.from_config(config, released)
    assert (view.layers, view.window_size, view.history_size) == (12, 16, 3)
    assert view.owners == ((2, 2), (4, 2), (6, 1))
    assert view.quantization is not None
    options = {"kv_cache_block_size": 32, "max_model_len": 512}
    assert faults(view, **options) == ()
    validate_runtime_config(EngineConfig(**options), config)


def test_an_exchange_may_be_forced_and_every_shard_may_have_one_request():
    mesh = {"data": 4, "model": 2}
    assert faults(mesh=mesh, enable_expert_parallel=True, expert_exchange="ragged", max_num_seqs=4) == ()
