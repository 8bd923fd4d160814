"""Models, tokens, health and metrics."""

import time

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers import servers


def test_the_served_model_is_listed_and_no_other_exists(client):
    models = client.models.list().data
    assert [model.id for model in models] == [servers.MODEL]
    assert client.models.retrieve(servers.MODEL).max_model_len == 1024
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another/model")
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="another", messages=[{"role": "user", "content": "x"}])


@pytest.mark.parametrize("text", ["plain", "žluťoučký 🙂", "<｜User｜> is text", "a" * 5000])
def test_tokens_lead_back_to_the_text(http, text):
    found = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    assert found["count"] == len(found["tokens"])
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}


def test_a_harness_finds_the_special_tokens(http):
    info = http.get("/tokenizer_info").json()
    assert http.post("/detokenize", json={"tokens": [info["eos_token_id"]]}).json()["prompt"] == info["eos_token"]
    assert (info["bos_token_id"], info["model_max_length"]) == (0, 1024)


def test_tokens_of_a_conversation_are_those_a_request_uses(http, client):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a prime."}]
    found = http.post("/tokenize", json={"messages": messages}).json()
    reply = client.chat.completions.create(model=servers.MODEL, messages=messages, max_tokens=1)
    assert found["count"] == reply.usage.prompt_tokens
    text = http.post("/detokenize", json={"tokens": found["tokens"]}).json()["prompt"]
    assert text.startswith("<｜begin▁of▁sentence｜><｜System｜>Reasoning Effort: 75") and text.endswith("<think>")


def test_thinking_controls_reach_the_prompt(http):
    def prompt(**controls):
        body = {"messages": [{"role": "user", "content": "Name a prime."}], **controls}
        return http.post("/detokenize", json={"tokens": http.post("/tokenize", json=body).json()["tokens"]}).json()[
            "prompt"
        ]

    assert "Reasoning Effort: 50 " in prompt(reasoning_effort="low")
    assert "Reasoning Effort: 9 " in prompt(reasoning_effort="max", thinking={"type": "enabled", "effort": 9})
    for off in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"thinking": False}}):
        assert prompt(**off).endswith("<｜Assistant｜></think>") and "Reasoning Effort" not in prompt(**off)


def test_unknown_paths_and_methods_are_answered_in_the_same_form(http):
    for answer in (http.get("/v1/nothing"), http.get("/v1/chat/completions")):
        assert answer.status_code in (404, 405)
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert http.get("/v1/chat/completions").headers["allow"] == "POST"
    assert http.head("/health").status_code == 200


def test_metrics_tell_what_the_engine_did(http, client, server):
    def read():
        families = text_string_to_metric_families(http.get("/metrics").text)
        return {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}

    before = read()
    client.completions.create(model=servers.MODEL, prompt="x", max_tokens=3, extra_body={"ignore_eos": True})
    server.wait_until_idle()
    after = read()
    for name, change in (
        ("v41jax_generated_tokens_total", 3),
        ("v41jax_prompt_tokens_total", 2),
        ("v41jax_requests_finished_total", 1),
        ("v41jax_time_to_first_token_seconds_count", 1),
        ("v41jax_time_per_output_token_seconds_count", 1),
    ):
        assert after[name] - before[name] == change, name
    assert after["v41jax_pages"] == 160 and after["v41jax_slots_free"] == 4
    assert after["v41jax_requests_running"] == after["v41jax_requests_waiting"] == 0
    assert {"v41jax_prefix_hit_tokens_total", "v41jax_rows_replayed_total", "v41jax_recompiles_total"} <= set(after)


def test_a_stream_is_open_until_its_end_and_leaves_no_task(http, client):
    def read():
        families = text_string_to_metric_families(http.get("/metrics").text)
        values = {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}
        return values["v41jax_http_open"], values["v41jax_event_loop_tasks"]

    idle = read()
    assert idle[0] == 0
    options = {"max_tokens": 200, "stream": True, "extra_body": {"ignore_eos": True}}
    with client.completions.create(model=servers.MODEL, prompt="x", **options) as stream:
        next(iter(stream))
        running = read()
    end = time.monotonic() + 60
    while read() != idle:
        assert time.monotonic() < end, (read(), idle)
        time.sleep(0.02)
    assert running[0] == 1 and running[1] > idle[1]
