"""Every rejected option is refused before a weight is read, all of them at once (scenario A31).

The directory holds a config.json and nothing else: whoever looks for a weight fails in another way.
"""

from __future__ import annotations

import json
import re

import pytest

from scheduler.runtime_config import EngineConfig, RuntimeConfigError
from tests.acceptance.model import acceptance_config
from v41jax.config import ConfigError
from v41jax.engine import Engine

REFUSED = [
    ({"execution_mode": "GRAPH"}, "execution_mode 'GRAPH'"),
    ({"compile_level": 1}, "compile_level 1"),
    ({"execution_mode": "PIECEWISE"}, "'PIECEWISE' needs compile_level 0"),
    ({"pipeline_parallel_size": 2}, "pipeline_parallel_size 2"),
    ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size 2"),
    ({"decode_context_parallel_size": 2}, "decode_context_parallel_size 2"),
    ({"data_parallel_size": 2}, "data_parallel_size 2"),
    ({"enable_dp_attention": True}, "enable_dp_attention"),
    ({"two_batch_overlap": True}, "two_batch_overlap"),
    ({"kv_transfer_connector": "other"}, "kv_transfer_connector 'other'"),
    ({"rapid_serve": True}, "rapid_serve"),
    ({"plugin_mode": True}, "plugin_mode"),
    ({"online_quantization": "int8"}, "online_quantization 'int8'"),
    ({"enable_eplb": True}, "enable_eplb"),
    ({"index_cache_dtype": "bf16"}, "index_cache_dtype 'bf16'"),
    ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype 'fp8'"),
    ({"kv_cache_block_size": 33}, "kv_cache_block_size 33 is odd"),
    ({"kv_cache_block_size": 16}, "kv_cache_block_size 16 must be"),
    ({"kv_cache_block_size": 48}, "kv_cache_block_size 48 must be"),
    ({"kv_cache_block_size": 30}, "encoder_swa_bounded_replay on"),
    ({"kv_cache_block_size": 30}, "decoder_swa_bounded_replay on"),
    ({"mesh": {"model": 3}}, "3 does not divide num_attention_heads 2"),
    ({"mesh": {"model": 8}, "enable_expert_parallel": True}, "8 does not divide n_routed_experts 4"),
    ({"speculative_method": "eagle", "num_speculative_tokens": 5}, "speculative_method 'eagle'"),
    ({"speculative_method": "dspark", "num_speculative_tokens": 6}, "num_speculative_tokens 6 is outside 1..5"),
    ({"speculative_method": "dspark", "num_speculative_tokens": 5}, "the checkpoint has none"),
    ({"speculative_method": "dspark", "speculative_model": "other"}, "speculative_model 'other'"),
    ({"relaxed_acceptance": True}, "relaxed_acceptance"),
    ({"dynamic_verify_lengths": True}, "needs a calibration_profile"),
    ({"export_hidden_states": True}, "export_hidden_states"),
    ({"prompt_logprobs": True}, "prompt_logprobs"),
    ({"max_num_batched_tokens": 63}, "max_num_batched_tokens 63 is below two pages"),
]
VALID = {"kv_cache_block_size": 32, "max_num_batched_tokens": 64, "max_model_len": 320}


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(acceptance_config().to_dict()))
    return tmp_path


def faults(directory, **options):
    with pytest.raises(RuntimeConfigError) as caught:
        Engine.from_checkpoint(directory, EngineConfig(**{**VALID, **options}))
    return caught.value.faults


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_a_refused_option(directory, options, words):
    assert any(words in fault for fault in faults(directory, **options))


def test_all_faults_are_reported_together(directory):
    together, expected = {}, []
    for options, words in REFUSED:
        if not together.keys() & options.keys():
            together |= options
            expected.append(words)
    found = faults(directory, **together)
    assert len(expected) > 20
    for words in expected:
        assert any(words in fault for fault in found), words


def test_valid_options_get_as_far_as_the_weights(directory):
    with pytest.raises(Exception) as caught:
        Engine.from_checkpoint(directory, EngineConfig(**VALID))
    assert not isinstance(caught.value, RuntimeConfigError)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("architectures",), ["OtherForCausalLM"]),
        (("quantization_config", "quant_method"), "awq"),
        (("quantization_config", "weight_block_size"), [128, 128]),
        (("quantization_config", "scale_fmt"), "float"),
        (("quantization_config", "activation_scheme"), "static"),
        (("quantization_config", "expert_dtype"), "fp8"),
    ],
)
def test_a_checkpoint_of_another_kind(directory, path, value):
    root = acceptance_config().to_dict()
    section = root
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = value
    (directory / "config.json").write_text(json.dumps(root))
    with pytest.raises((ConfigError, RuntimeConfigError), match=path[-1].removesuffix("s")):
        Engine.from_checkpoint(directory, EngineConfig(**VALID))


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'{"architectures": 1, "architectures": 2}', b"[" * 100_000])
def test_a_config_that_is_no_json_is_named(directory, content):
    (directory / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(f"{directory / 'config.json'}: not a JSON file")):
        Engine.from_checkpoint(directory, EngineConfig(**VALID))
