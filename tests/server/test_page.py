"""The page in a real browser: a conversation, thinking apart, a tool call answered by hand, live statistics."""

import json

import pytest

from tests.helpers import browser, forced
from tests.server.test_chat import CALL, WEATHER

needs_browser = pytest.mark.skipif(browser.chromium() is None, reason="no Chromium: apt-get install chromium")


def test_the_page_is_whole_and_names_the_model(http):
    answer = http.get("/")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert '"model": "small"' in answer.text and "{SETTINGS}" not in answer.text
    assert "http://" not in answer.text and "https://" not in answer.text


@needs_browser
def test_a_conversation_with_a_tool_in_a_browser(server, engine, tmp_path):
    texts = [f"I look first.</think>A moment.\n\n{CALL}", "Warm <b>indeed</b>.</think>It is 4 degrees."]
    with forced.replies(engine, *texts), browser.page() as page:
        page.open(server.url)
        page.type("#tools", json.dumps([WEATHER]))
        page.type("#input", "Weather in Oslo?")
        page.click("#send")
        page.wait_for("document.querySelector('.call button')")
        assert page.evaluate("document.querySelector('.reasoning').textContent") == "I look first."
        assert page.evaluate("document.querySelector('.content').textContent") == "A moment."
        assert page.evaluate("document.querySelector('.call b').textContent") == "get_weather"
        arguments = page.evaluate("document.querySelector('.call code').textContent")
        assert json.loads(arguments) == {"city": "Oslo", "days": 2}
        page.type(".call textarea", "4C")
        page.click(".call button")
        page.wait_for(
            "document.querySelectorAll('.turn.assistant').length === 2 && !document.querySelector('#send').hidden"
        )
        assert page.evaluate("document.querySelectorAll('.content')[1].textContent") == "It is 4 degrees."
        # What a model writes is text, never markup.
        assert page.evaluate("document.querySelectorAll('.reasoning')[1].textContent") == "Warm <b>indeed</b>."
        rows = page.wait_for(
            "document.querySelector('#statistics').innerText.includes('tokens per second') && "
            "document.querySelector('#statistics').innerText"
        )
        assert "free slots" in rows and page.evaluate("document.querySelector('#health').textContent") == "ok"
        page.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000


@needs_browser
def test_stopping_a_reply_in_a_browser_frees_what_it_held(server):
    with browser.page() as page:
        page.open(server.url)
        page.evaluate("document.querySelector('#max_tokens').value = 900")
        page.type("#input", "Go on for ever.")
        page.click("#send")
        page.wait_for("document.querySelector('.reasoning, .content')")
        page.click("#stop")
        page.wait_for("document.body.innerText.includes('Stopped.')")
        assert server.wait_until_idle()["pages_used"] == 0
