"""Images over HTTP: `image_url` parts with data URLs, shared by choices, reported as cached, refused by number."""

import base64
import json

import pytest

from tests.helpers import servers
from tests.vision.builders import encoded, random_picture

WIDE, TALL = encoded(random_picture(100, 80)), encoded(random_picture(60, 90, seed=1), "JPEG")


def part(data):
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}


def question(*images):
    parts = [{"type": "text", "text": "Compare these pictures, which were made from random numbers:"}]
    return [{"role": "user", "content": [*parts, *map(part, images), {"type": "text", "text": "Which is wider?"}]}]


def ask(server, *images, **options):
    options = {"max_tokens": 4, "temperature": 0, "extra_body": {"ignore_eos": True}} | options
    return server.client().chat.completions.create(model=servers.MODEL, messages=question(*images), **options)


def test_images_of_a_chat_are_encoded_once_counted_and_found_in_the_cache(server):
    seen = server.engine.core.images
    encoded_before, hits_before = seen.encoded, server.wait_until_idle()["hit_images"]
    first = ask(server, WIDE, TALL, n=2)
    assert seen.encoded - encoded_before == 2
    again = ask(server, WIDE, TALL)
    other = ask(server, TALL, WIDE)
    assert first.usage.prompt_tokens == again.usage.prompt_tokens == other.usage.prompt_tokens > 56 + 50
    assert first.choices[0].message == first.choices[1].message == again.choices[0].message
    assert again.usage.prompt_tokens_details.cached_tokens >= 96
    # Equal ids: the page of text before the images is shared, and nothing after it.
    assert other.usage.prompt_tokens_details.cached_tokens == servers.PAGE
    statistics = server.wait_until_idle()
    assert statistics["hit_images"] - hits_before >= 1 and statistics["vision_requests"] == 0
    assert seen.encoded - encoded_before == 2


def test_tokens_of_a_conversation_count_its_images(server):
    with server.http() as http:
        counted = http.post("/tokenize", json={"messages": question(WIDE, TALL)}).json()
        metrics = http.get("/metrics").text
    usage = ask(server, WIDE, TALL, max_tokens=1).usage
    assert counted["count"] == len(counted["tokens"]) == usage.prompt_tokens
    for name in ("prompt_images", "prefix_hit_images", "images_encoded"):
        assert f"v41jax_{name}_total " in metrics


MALFORMED = {
    "no comma": "data:image/png;base64",
    "no base64": "data:image/png,abc",
    "no image": "data:text/plain;base64,AAAA",
    "bad characters": "data:image/png;base64,@@@@",
    "bad padding": "data:image/png;base64,AAA",
    "nothing": "data:image/png;base64,",
    "empty": "",
    "other scheme": "ftp://host/a.png",
    "remote": "http://127.0.0.1/a.png",
    "file": "file:///etc/hostname",
    "surrogate": "data:image/png;base64,\ud800",
    "null byte": "file:///\0",
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_an_image_url_that_is_none_is_refused(server, kind):
    parts = [{"type": "image_url", "image_url": {"url": MALFORMED[kind]}}]
    with server.http() as http:
        body = json.dumps({"max_tokens": 1, "messages": [{"role": "user", "content": parts}]})
        answer = http.post("/v1/chat/completions", content=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "messages" and "image 0: " in answer.json()["error"]["message"]


@pytest.mark.parametrize("value", [None, 5, [], {}, {"url": None}, {"url": 5}, {"url": {"url": "x"}}])
def test_an_image_part_without_a_url_is_refused(server, value):
    with server.http() as http:
        body = {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": value}]}]}
        answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and "has no URL" in answer.json()["error"]["message"], answer.text


def test_an_image_that_cannot_be_used_is_named(server):
    with server.http() as http:
        body = {"model": servers.MODEL, "max_tokens": 1, "messages": question(WIDE, WIDE[: len(WIDE) // 2])}
        answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("image 1: the PNG image is truncated")
    assert server.wait_until_idle()["vision_requests"] == 0


def test_a_closed_stream_releases_its_images(server):
    with ask(server, WIDE, max_tokens=300, stream=True) as stream:
        next(iter(stream))
    assert server.wait_until_idle()["vision_requests"] == 0
