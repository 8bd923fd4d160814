"""The literals of the chat protocol: control tokens, task tokens, and the fixed strings of the tool-call markup.

Every string here must match byte for byte what the model was trained on (chat protocol, "Special tokens" and
"Tool-call dialect (DSML)"). Ids are not here: they are read from the tokenizer of a checkpoint.
"""

from __future__ import annotations

BEGIN_OF_SENTENCE = "<｜begin▁of▁sentence｜>"
END_OF_SENTENCE = "<｜end▁of▁sentence｜>"
PADDING = "<｜▁pad▁｜>"
SYSTEM = "<｜System｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
DSML = "｜DSML｜"
LATEST_REMINDER = "<｜latest_reminder｜>"
IMAGE = "<｜deepseek_image｜>"

TASKS: dict[str, str] = {
    "action": "<｜action｜>",
    "query": "<｜query｜>",
    "authority": "<｜authority｜>",
    "domain": "<｜domain｜>",
    "title": "<｜title｜>",
    "read_url": "<｜read_url｜>",
}
"""Task name of a user message -> its control token."""

CONTROL_TOKENS: tuple[str, ...] = (
    BEGIN_OF_SENTENCE,
    END_OF_SENTENCE,
    PADDING,
    SYSTEM,
    USER,
    ASSISTANT,
    THINK_OPEN,
    THINK_CLOSE,
    DSML,
    LATEST_REMINDER,
    *TASKS.values(),
    IMAGE,
)
"""Every literal that is one token when the protocol writes it, and plain text when a caller does."""

STOP_TOKENS: tuple[str, ...] = (END_OF_SENTENCE, USER, SYSTEM)
"""Generation ends at any of these; the last two mean that the model began somebody else's turn."""

MARKUP_TOKENS: frozenset[str] = frozenset({THINK_OPEN, THINK_CLOSE, DSML})
"""Control tokens a reply may hold in its middle: reasoning delimiters and the tool-call marker."""

CALLS_OPEN = f"<{DSML} calls>"
CALLS_CLOSE = f"</{DSML} calls>"
INVOKE_OPEN = f'<{DSML} invoke name="'
INVOKE_HEAD_END = '">'
INVOKE_CLOSE = f"</{DSML} invoke>"
PARAMETER_OPEN = f"<{DSML} parameter"
PARAMETER_CLOSE = f"</{DSML} parameter>"
BLANK_LINE = "\n\n"
