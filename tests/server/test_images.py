"""Images over HTTP: `image_url` parts with data URLs, shared by choices, reported as cached, refused by number."""

import base64

import pytest

from tests.helpers import servers
from tests.vision.builders import encoded, random_picture

WIDE, TALL = encoded(random_picture(100, 80)), encoded(random_picture(60, 90, seed=1), "JPEG")


@pytest.fixture(scope="module")
def sighted(tmp_path_factory):
    """A server whose checkpoint has a vision tower."""
    directory = servers.write_checkpoint(tmp_path_factory.mktemp("vision") / servers.MODEL, ("text", "vision"))
    with servers.open_engine(directory) as engine, servers.running(engine) as server:
        yield server


def part(data):
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}


def question(*images):
    parts = [{"type": "text", "text": "Compare these pictures, which were made from random numbers:"}]
    return [{"role": "user", "content": [*parts, *map(part, images), {"type": "text", "text": "Which is wider?"}]}]


def ask(server, *images, **options):
    options = {"max_tokens": 4, "temperature": 0, "extra_body": {"ignore_eos": True}} | options
    return server.client().chat.completions.create(model=servers.MODEL, messages=question(*images), **options)


def test_images_of_a_chat_are_encoded_once_counted_and_found_in_the_cache(sighted):
    seen = sighted.engine.core.images
    first = ask(sighted, WIDE, TALL, n=2)
    assert seen.encoded == 2
    again = ask(sighted, WIDE, TALL)
    other = ask(sighted, TALL, WIDE)
    assert first.usage.prompt_tokens == again.usage.prompt_tokens == other.usage.prompt_tokens > 56 + 50
    assert first.choices[0].message == first.choices[1].message == again.choices[0].message
    assert again.usage.prompt_tokens_details.cached_tokens >= 96
    # Equal ids: the page of text before the images is shared, and nothing after it.
    assert other.usage.prompt_tokens_details.cached_tokens == servers.PAGE
    statistics = sighted.wait_until_idle()
    assert statistics["hit_images"] >= 1 and statistics["vision_requests"] == 0
    assert seen.encoded == 2


def test_an_image_that_cannot_be_used_is_named(sighted):
    with sighted.http() as http:
        body = {"model": servers.MODEL, "max_tokens": 1, "messages": question(WIDE, WIDE[: len(WIDE) // 2])}
        answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("image 1: the PNG image is truncated")
    assert sighted.wait_until_idle()["vision_requests"] == 0


def test_a_closed_stream_releases_its_images(sighted):
    with ask(sighted, WIDE, max_tokens=300, stream=True) as stream:
        next(iter(stream))
    assert sighted.wait_until_idle()["vision_requests"] == 0
