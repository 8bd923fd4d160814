"""Whether and how hard the model thinks: the effort scale, and the request fields that decide both.

Sources: chat protocol, "Modes and reasoning effort" and the thinking controls of "HTTP endpoint".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from v41jax.protocol.errors import Fault, ProtocolError, shorten

ThinkingMode = Literal["thinking", "chat"]

EFFORT_NAMES: dict[str, int] = {"low": 50, "high": 75, "max": 100, "xhigh": 75}
"""`xhigh` is an alias that clients of other models send."""

DEFAULT_EFFORT = 75
_RULE = "must be an integer from 1 to 100, or 'low' (50), 'high' (75) or 'max' (100)"


class ThinkingOptions(NamedTuple):
    """Arguments of `encode_chat` that a request's thinking fields resolve to; pass as `**options._asdict()`.

    Attributes:
      thinking_mode: `thinking` or `chat`.
      reasoning_effort: 1..100, valid in both modes.
      drop_thinking: whether reasoning of earlier turns may leave the prompt.
    """

    thinking_mode: ThinkingMode = "thinking"
    reasoning_effort: int = DEFAULT_EFFORT
    drop_thinking: bool = True


def read_effort(value: Any, param: str, faults: list[Fault]) -> int:
    """The integer of an effort; adds a fault and returns the default for anything else, booleans and floats too."""
    if isinstance(value, str) and value in EFFORT_NAMES:
        return EFFORT_NAMES[value]
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 100:
        return value
    faults.append(Fault(param, f"{_RULE}, got {shorten(value)}"))
    return DEFAULT_EFFORT


def read_mode(value: Any, param: str, faults: list[Fault]) -> ThinkingMode:
    """Checks a `thinking_mode`."""
    if isinstance(value, str) and value in ("thinking", "chat"):
        return value  # type: ignore[return-value]
    faults.append(Fault(param, f"must be 'thinking' or 'chat', got {shorten(value)}"))
    return "thinking"


def effort_line(effort: int) -> str:
    """The line that opens a thinking conversation, with its two newlines."""
    return f"Reasoning Effort: {effort} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"


def resolve_thinking(
    thinking: Any = None,
    reasoning_effort: Any = None,
    chat_template_kwargs: Any = None,
    defaults: ThinkingOptions | None = None,
) -> ThinkingOptions:
    """Resolves the request fields of the same names, strongest first, over the server's defaults.

    `thinking` is `{"type": "enabled" | "disabled", "effort": E}`; `reasoning_effort` is an effort or `"none"`, which
    disables thinking; `chat_template_kwargs` may hold `thinking`, `enable_thinking`, `thinking_mode`, `drop_thinking`
    and `reasoning_effort`. An effort alone never enables what a weaker field disabled. None means absent.

    Raises:
      ProtocolError: with every malformed field, also where a stronger field would have hidden it.
    """
    defaults = ThinkingOptions() if defaults is None else defaults
    faults: list[Fault] = []
    effort = defaults.reasoning_effort
    template_on, template_effort, drop = _read_template(chat_template_kwargs, faults)
    enabled = defaults.thinking_mode == "thinking" if template_on is None else template_on
    effort = effort if template_effort is None else template_effort
    if reasoning_effort == "none" and isinstance(reasoning_effort, str):
        enabled = False
    elif reasoning_effort is not None:
        effort = read_effort(reasoning_effort, "reasoning_effort", faults)
    explicit, explicit_effort = _read_thinking(thinking, faults)
    enabled = enabled if explicit is None else explicit
    effort = effort if explicit_effort is None else explicit_effort
    if faults:
        raise ProtocolError(faults)
    return ThinkingOptions("thinking" if enabled else "chat", effort, defaults.drop_thinking if drop is None else drop)


def _read_thinking(value: Any, faults: list[Fault]) -> tuple[bool | None, int | None]:
    if value is None:
        return None, None
    if not isinstance(value, Mapping):
        faults.append(Fault("thinking", f"must be an object with `type`, got {shorten(value)}"))
        return None, None
    kind = value.get("type")
    if kind not in ("enabled", "disabled"):
        faults.append(Fault("thinking.type", f"must be 'enabled' or 'disabled', got {shorten(kind)}"))
    effort = value.get("effort")
    return kind == "enabled", None if effort is None else read_effort(effort, "thinking.effort", faults)


def _read_template(value: Any, faults: list[Fault]) -> tuple[bool | None, int | None, bool | None]:
    if value is None:
        return None, None, None
    if not isinstance(value, Mapping):
        faults.append(Fault("chat_template_kwargs", f"must be an object, got {shorten(value)}"))
        return None, None, None
    param = "chat_template_kwargs"
    switches = {}
    for key in ("thinking", "enable_thinking", "drop_thinking"):
        if value.get(key) is not None:
            if isinstance(value[key], bool):
                switches[key] = value[key]
            else:
                faults.append(Fault(f"{param}.{key}", f"must be true or false, got {shorten(value[key])}"))
    drop = switches.pop("drop_thinking", None)
    if value.get("thinking_mode") is not None:
        switches["thinking_mode"] = read_mode(value["thinking_mode"], f"{param}.thinking_mode", faults) == "thinking"
    if len(set(switches.values())) > 1:
        faults.append(Fault(param, f"{' and '.join(switches)} contradict each other"))
    enabled = next(iter(switches.values()), None)
    effort = value.get("reasoning_effort")
    if effort == "none" and isinstance(effort, str):
        return (False if enabled is None else enabled), None, drop
    return enabled, None if effort is None else read_effort(effort, f"{param}.reasoning_effort", faults), drop
