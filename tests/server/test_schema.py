"""Requests that schemathesis makes from the server's own description: none of them is the server's fault."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

MODES = list(GenerationMode)
EXAMPLES = 25


def shortened(body):
    """The same body, made to end soon where it is a request for tokens at all."""
    if isinstance(body, dict):
        for name in ("max_tokens", "max_completion_tokens", "n"):
            if isinstance(body.get(name), int) and body[name] > 1:
                body[name] = 1
    return body


@pytest.mark.parametrize("mode", MODES)
def test_no_generated_request_is_the_servers_fault(scripted, mode):
    description = schemathesis.openapi.from_url(f"{scripted.url}/openapi.json")
    answered = {}
    for found in description.get_all_operations():
        operation = found.ok()
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue

        @settings(max_examples=EXAMPLES, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case):
            case.body = shortened(case.body)
            answer = case.call(timeout=300)
            answered.setdefault(case.operation.label, set()).add(answer.status_code)
            assert answer.status_code in (200, 400, 404), answer.text
            if answer.status_code >= 400:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

        check()
    assert {"POST /v1/chat/completions", "POST /v1/completions", "POST /tokenize", "POST /detokenize"} <= set(answered)
    assert 400 in answered["POST /v1/chat/completions"] | answered["POST /v1/completions"]
