"""Token counts of a request: `usage` in answers and in the last event of a stream."""

from __future__ import annotations

from typing import Any


class Usage:
    """Counts as deltas arrive; a prompt is counted once, whatever the number of its choices.

    Args:
      prompt_tokens: of all prompts of the request.
    """

    def __init__(self, prompt_tokens: int):
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self._cached: dict[int, int] = {}

    def saw_cached(self, prompt: int, tokens: int) -> None:
        """Tokens of a prompt that were reused, as its first choice tells."""
        self._cached[prompt] = tokens

    def as_json(self) -> dict[str, Any]:
        """The object of the API."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }
