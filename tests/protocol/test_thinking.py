"""Thinking controls of a request: who wins, and what is refused."""

from __future__ import annotations

import pytest

from v41jax.protocol import ProtocolError, ThinkingOptions, resolve_thinking

ON, OFF = {"type": "enabled"}, {"type": "disabled"}


def resolved(thinking=None, effort=None, template=None, defaults=None) -> tuple[str, int]:
    return resolve_thinking(thinking, effort, template, defaults)[:2]


@pytest.mark.parametrize(
    ("thinking", "effort", "template", "expected"),
    [
        (None, None, None, ("thinking", 75)),
        (OFF, None, None, ("chat", 75)),
        (ON, None, None, ("thinking", 75)),
        ({**ON, "effort": 20}, 90, {"reasoning_effort": 10}, ("thinking", 20)),
        ({**ON, "effort": None}, 90, None, ("thinking", 90)),
        ({**OFF, "effort": "low"}, None, None, ("chat", 50)),
        (None, "max", {"reasoning_effort": 10}, ("thinking", 100)),
        (None, None, {"reasoning_effort": "low"}, ("thinking", 50)),
        (None, "none", None, ("chat", 75)),
        (None, "none", {"thinking": True}, ("chat", 75)),
        (ON, "none", {"reasoning_effort": 10}, ("thinking", 10)),
        (None, 40, {"thinking": False}, ("chat", 40)),
        ({**ON}, None, {"enable_thinking": False}, ("thinking", 75)),
        (OFF, None, {"enable_thinking": True}, ("chat", 75)),
        (None, None, {"thinking_mode": "chat"}, ("chat", 75)),
        (None, None, {"thinking": True, "enable_thinking": True, "thinking_mode": "thinking"}, ("thinking", 75)),
        (None, None, {"reasoning_effort": "none"}, ("chat", 75)),
        (None, None, {"reasoning_effort": "none", "thinking": True}, ("thinking", 75)),
        (None, None, {"thinking": None, "unknown": 1}, ("thinking", 75)),
    ],
)
def test_the_stronger_field_wins(thinking, effort, template, expected):
    assert resolved(thinking, effort, template) == expected


def test_server_defaults_are_the_weakest():
    defaults = ThinkingOptions("chat", 30, drop_thinking=False)
    assert resolve_thinking(defaults=defaults) == defaults
    assert resolved(None, 90, None, defaults) == ("chat", 90)
    assert resolved(ON, None, None, defaults) == ("thinking", 30)
    assert resolved(None, None, {"thinking": True}, defaults) == ("thinking", 30)
    assert resolve_thinking(None, None, {"drop_thinking": True}, defaults).drop_thinking is True


@pytest.mark.parametrize(
    ("thinking", "effort", "template", "field"),
    [
        ("on", None, None, "thinking"),
        (True, None, None, "thinking"),
        ({}, None, None, "thinking.type"),
        ({"type": "auto"}, None, None, "thinking.type"),
        ({"type": ["enabled"]}, None, None, "thinking.type"),
        ({**ON, "effort": "none"}, None, None, "thinking.effort"),
        ({**OFF, "effort": 0}, None, None, "thinking.effort"),
        (None, "medium", None, "reasoning_effort"),
        (None, True, None, "reasoning_effort"),
        (None, 37.0, None, "reasoning_effort"),
        (OFF, 101, None, "reasoning_effort"),
        (None, None, [], "chat_template_kwargs"),
        (None, None, {"thinking": "yes"}, "chat_template_kwargs.thinking"),
        (None, None, {"enable_thinking": 1}, "chat_template_kwargs.enable_thinking"),
        (None, None, {"drop_thinking": 0}, "chat_template_kwargs.drop_thinking"),
        (None, None, {"thinking_mode": "fast"}, "chat_template_kwargs.thinking_mode"),
        (None, None, {"reasoning_effort": "medium"}, "chat_template_kwargs.reasoning_effort"),
        (ON, 50, {"thinking": True, "enable_thinking": False}, "chat_template_kwargs"),
    ],
)
def test_a_malformed_field_is_named_even_where_a_stronger_one_hides_it(thinking, effort, template, field):
    with pytest.raises(ProtocolError) as caught:
        resolve_thinking(thinking, effort, template)
    assert [fault.param for fault in caught.value.faults] == [field]


def test_all_malformed_fields_are_named():
    with pytest.raises(ProtocolError) as caught:
        resolve_thinking({"type": "x", "effort": 0}, "medium", {"thinking": 1})
    fields = ["chat_template_kwargs.thinking", "reasoning_effort", "thinking.type", "thinking.effort"]
    assert [fault.param for fault in caught.value.faults] == fields
