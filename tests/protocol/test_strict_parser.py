"""The strict reading: worked replies pass, each broken rule is named."""

from __future__ import annotations

import pytest

from tests.protocol.worked_prompts import WORKED_PROMPTS
from v41jax.protocol.events import ToolCall
from v41jax.protocol.strict_parser import FormatError, parse_strictly

EOS = "<｜end▁of▁sentence｜>"
CALL = (
    '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'
    '<｜DSML｜ parameter name="a" string="false">[1]</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
)


def test_the_reply_of_the_worked_prompt_passes():
    text = WORKED_PROMPTS["P10"].prompt.split("<think>Need")[1].split(EOS)[0]
    reply = parse_strictly("Need" + text + EOS, True)
    assert (reply.reasoning, reply.content) == ("Need both.", "Checking.")
    assert reply.calls == (
        ToolCall("get_weather", '{"city": "Oslo", "days": 2}'),
        ToolCall("get_weather", '{"city": "Rome"}'),
    )


def test_calls_without_parameters_pass():
    text = CALL.replace('<｜DSML｜ parameter name="a" string="false">[1]</｜DSML｜ parameter>', "")
    assert parse_strictly(text + EOS, False).calls == (ToolCall("f", "{}"),)


@pytest.mark.parametrize(
    ("text", "thinking", "rule"),
    [
        ("hi", False, "does not end"),
        ("hi" + EOS, True, "not closed"),
        ("a<think>b" + EOS, False, "content holds the control token <think> at character 1"),
        ("a</think>b" + EOS, False, "content holds the control token </think>"),
        ("a<think>b</think>c" + EOS, True, "reasoning holds the control token <think>"),
        ("a<｜User｜>b</think>c" + EOS, True, "reasoning holds the control token <｜User｜>"),
        (EOS + EOS, False, "content holds the control token"),
        (CALL[1:] + EOS, False, "content holds the control token ｜DSML｜"),
        (CALL + CALL + EOS, False, "no call at character"),
        (CALL + "\n" + EOS, False, "calls block is not"),
        (CALL.replace("calls>\n<", "calls><") + EOS, False, "calls block is not"),
        (CALL.replace('"f">\n', '"f">') + EOS, False, "no call at character"),
        (CALL.replace("invoke>\n", "invoke>") + EOS, False, "no call at character"),
        (CALL.replace("parameter>\n", "parameter>") + EOS, False, "no parameter at character"),
        (CALL.replace(' string="false"', "") + EOS, False, "no parameter at character"),
        (CALL.replace("[1]", "[1") + EOS, False, "is not JSON"),
        ("\n\n<｜DSML｜ calls>\n</｜DSML｜ calls>" + EOS, False, "holds no call"),
        (
            '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n</｜DSML｜ invoke>\n</｜DSML｜ calls>' + EOS,
            False,
            "no empty line",
        ),
    ],
)
def test_each_broken_rule_is_named(text: str, thinking: bool, rule: str):
    with pytest.raises(FormatError, match=rule):
        parse_strictly(text, thinking)


def test_a_parameter_given_twice_is_refused():
    parameter = '<｜DSML｜ parameter name="a" string="false">[1]</｜DSML｜ parameter>\n'
    with pytest.raises(FormatError, match="'a' twice"):
        parse_strictly(CALL.replace(parameter, parameter * 2) + EOS, False)
