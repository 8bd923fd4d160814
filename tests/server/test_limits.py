"""Keys, sizes, queues, time limits, disconnects and stopping."""

import concurrent.futures
import dataclasses
import json
import socket
import threading
import time

import httpx
import openai
import pytest

from tests.helpers import servers
from v41jax import engine_thread
from v41jax.engine_requests import LiveRequest
from v41jax.engine_thread import REFUSED_STEPS

QUESTION = [{"role": "user", "content": "Count."}]
LONG = {"model": servers.MODEL, "messages": QUESTION, "max_tokens": 900, "ignore_eos": True}


@pytest.fixture
def limited(engine):
    """Servers of the shared engine with other options; the shared server's bounds come back."""
    waiting = engine.max_waiting

    def start(**options):
        return servers.running(engine, **options)

    yield start
    engine.max_waiting = waiting


def test_a_key_is_needed_where_one_is_set(limited):
    with limited(api_keys=("first", "second")) as server, server.http() as http:
        for key in ("first", "second"):
            assert server.client(key).models.list().data[0].id == servers.MODEL
        with pytest.raises(openai.AuthenticationError):
            server.client("third").models.list()
        for path in ("/v1/models", "/tokenize", "/v1/chat/completions"):
            assert http.request("GET", path).status_code == 401
        assert http.get("/health").status_code == http.get("/metrics").status_code == 200


def test_a_body_over_the_limit_is_refused_however_it_comes(limited):
    with limited(max_body_bytes=2000) as server, server.http() as http:
        body = b'{"prompt": "' + b"x" * 3000 + b'"}'

        def pieces():
            for start in range(0, len(body), 500):
                yield body[start : start + 500]

        for content in (body, pieces()):
            answer = http.post("/v1/completions", content=content)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_a_full_queue_is_answered_429_and_the_rest_is_served(limited, engine):
    with limited(max_waiting=2) as server:
        client = server.client()

        def ask(_):
            try:
                client.chat.completions.create(
                    model=servers.MODEL, messages=QUESTION, max_tokens=12, extra_body={"ignore_eos": True}
                )
                return "served"
            except openai.RateLimitError as error:
                assert error.response.headers["retry-after"]
                return "refused"

        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            outcomes = list(pool.map(ask, range(16)))
    assert outcomes.count("served") >= 2 and outcomes.count("refused") >= 1
    assert set(outcomes) == {"served", "refused"}


def test_a_request_that_takes_too_long_ends(limited, engine):
    with limited(request_timeout_s=1.0) as server, server.http() as http:
        answer = http.post("/v1/chat/completions", json=LONG)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        with pytest.raises(openai.APIError, match="longer than the server allows"):
            for _ in server.client().chat.completions.create(
                model=servers.MODEL, messages=QUESTION, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
            ):
                pass
        assert server.wait_until_idle()["pages_used"] == 0


def test_clients_that_leave_free_what_they_held(server, http):
    before = server.engine.statistics()["aborted"]
    with http.stream("POST", "/v1/chat/completions", json=LONG | {"stream": True, "n": 2}) as answer:
        # The second choice begins once the first has written the pages of the prompt.
        next(line for line in answer.iter_lines() if '"index":1' in line and "reasoning_content" in line)
    with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=server.url, timeout=1.5) as impatient:
        impatient.post("/v1/chat/completions", json=LONG)
    statistics = server.wait_until_idle()
    assert statistics["aborted"] - before == 3
    assert (statistics["pages_used"], statistics["slots_free"]) == (0, 4)


def send(server, route, content, *, length=None):
    """A connection with a request written to it, answered or not."""
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST {route} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length or len(content)}\r\n\r\n"
    connection = socket.create_connection((host, int(port)))
    connection.sendall(head.encode() + content)
    return connection


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_fault_of_the_server(server, http):
    def answers(status):
        lines = http.get("/metrics").text.splitlines()
        head = f'v41jax_http_answers_total{{route="/v1/chat/completions",status="{status}"}} '
        return sum(float(line.removeprefix(head)) for line in lines if line.startswith(head))

    left, failed = answers(499), answers(500)
    send(server, "/v1/chat/completions", b'{"messages": [', length=1000).close()
    end = time.monotonic() + 60
    while answers(499) == left and answers(500) == failed:
        assert time.monotonic() < end
        time.sleep(0.02)
    assert (answers(499), answers(500)) == (left + 1, failed)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_while_its_prompts_are_computed_frees_everything(server, stream):
    before = server.wait_until_idle()["aborted"]
    prompts = [[5 + index] * 900 for index in range(4)]
    body = {"prompt": prompts, "max_tokens": 100, "ignore_eos": True, "stream": stream}
    connection = send(server, "/v1/completions", json.dumps(body).encode())
    end = time.monotonic() + 60
    while not server.engine.statistics()["partial"]:
        assert time.monotonic() < end
        time.sleep(0.005)
    connection.close()
    statistics = server.wait_until_idle()
    assert statistics["aborted"] - before == 4
    assert (statistics["pages_used"], statistics["slots_free"], statistics["live"]) == (0, 4, 0)


def test_a_stopping_server_finishes_what_runs_and_refuses_the_rest(limited, engine):
    with limited() as server, server.http() as http:
        service = server.server._service
        collected = []

        def listen():
            stream = server.client().chat.completions.create(
                model=servers.MODEL, messages=QUESTION, max_tokens=25, stream=True, extra_body={"ignore_eos": True}
            )
            collected.extend(stream)

        listener = threading.Thread(target=listen)
        listener.start()
        while not engine.core.has_work:
            time.sleep(0.01)
        assert http.get("/health").status_code == 200
        service.draining = True
        assert http.get("/health").json() == {"status": "draining"}
        answer = http.post("/v1/chat/completions", json=LONG)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        server.server.stop()
        listener.join(300)
    assert collected[-1].choices[0].finish_reason == "length"


def test_a_failed_engine_is_told_to_probes_and_clients(http, engine, monkeypatch):
    monkeypatch.setattr(type(engine), "failure", property(lambda _: RuntimeError("out of memory")))
    health = http.get("/health")
    assert (health.status_code, health.json()) == (503, {"status": "failed", "error": "RuntimeError"})
    for route, body in (("/v1/chat/completions", LONG), ("/v1/completions", {"prompt": "x"})):
        answer = http.post(route, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_failed")


def test_a_step_that_is_refused_is_told_apart_from_an_engine_that_ends(checkpoint, monkeypatch):
    with servers.open_engine(checkpoint) as engine, servers.running(engine) as server, server.http() as http:

        def ask():
            answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
            return answer.status_code, answer.json()["error"]["code"], http.get("/health").status_code

        def fail(_):
            raise OSError("no such table")

        monkeypatch.setattr(engine.core._lookup, "step_rows", fail)
        monkeypatch.setattr(engine_thread, "REFUSED_SECONDS", 0.0)
        *refused, last = [ask() for _ in range(REFUSED_STEPS)]
        assert refused == [(500, "step_refused", 200)] * (REFUSED_STEPS - 1)
        assert last == (500, "engine_failed", 503)
        assert http.get("/health").json() == {"status": "failed", "error": "OSError"}
        assert ask() == (503, "engine_failed", 503)
        metrics = http.get("/metrics").text.splitlines()
        assert f"v41jax_requests_failed_total {REFUSED_STEPS}.0" in metrics
        assert f'v41jax_choices_total{{reason="failed"}} {REFUSED_STEPS}.0' in metrics


def test_an_error_behind_a_step_is_no_fault_of_the_request(checkpoint, monkeypatch):
    def fail(*_):
        raise ValueError("a token too many")

    with servers.open_engine(checkpoint) as engine, servers.running(engine) as server, server.http() as http:
        monkeypatch.setattr(LiveRequest, "take", fail)
        answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_failed")
        assert "token too many" not in answer.text
        assert http.get("/health").json() == {"status": "failed", "error": "ValueError"}


def test_options_that_make_no_sense_are_named():
    with pytest.raises(ValueError, match=r"max_choices 0.*max_waiting -1"):
        servers.ServerOptions(model_name="x", max_choices=0, max_waiting=-1)
    with pytest.raises(ValueError, match="keys"):
        servers.ServerOptions(model_name="x", api_keys=("",))
    with pytest.raises(dataclasses.FrozenInstanceError):
        servers.ServerOptions(model_name="x").model_name = "y"
