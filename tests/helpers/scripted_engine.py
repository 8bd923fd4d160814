"""An engine without a model, for tests of what stands in front of one: it answers every prompt with the same words."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from tests.helpers.servers import CONFIG, small_config
from tests.helpers.tokenizers import small_tokenizer
from v41jax.engine import Delta, Prompt
from v41jax.engine_core import TokenScore
from v41jax.image_planning import ImageError

WORDS = "Two is a prime."


class ScriptedEngine:
    """What a server asks of `Engine`, with a text in place of a model. It accepts no images."""

    def __init__(self) -> None:
        self.config = CONFIG
        self.tokenizer = small_tokenizer()
        self.failure: Exception | None = None
        self.max_waiting: int | None = None
        self.core = SimpleNamespace(
            runner=SimpleNamespace(setup=SimpleNamespace(config=small_config())),
            scheduler=SimpleNamespace(max_model_len=CONFIG.max_model_len, view=SimpleNamespace(eos_token_ids=(1,))),
        )

    def statistics(self) -> dict[str, Any]:
        """Nothing is counted."""
        return {}

    def prompt_with_images(self, *_: object, **__: object) -> Prompt:
        """Refuses."""
        raise ImageError("this engine accepts no images")

    async def stream(self, prompt: Prompt) -> AsyncIterator[Delta]:
        """The words and the end token, as many of them as the prompt allows."""
        ids = [*self.tokenizer.encode(WORDS), self.tokenizer.control_id("<｜end▁of▁sentence｜>")]
        wanted = prompt.sampling.logprobs
        scored = tuple(
            None if place == 0 else TokenScore(-1.0, ((token, -1.0),)) for place, token in enumerate(prompt.tokens)
        )
        for place, token in enumerate(ids):
            ends = token == ids[-1]
            full = place + 1 == prompt.sampling.max_tokens
            yield Delta(
                tokens=(token,),
                text="" if ends else self.tokenizer.decode([token]),
                finish_reason="eos" if ends else "max_tokens" if full else None,
                cached_tokens=0,
                scores=() if wanted is None else (TokenScore(-1.0, ((token, -1.0),) * wanted),),
                prompt_scores=scored if prompt.sampling.prompt_logprobs and place == 0 else (),
            )
            if ends or full:
                return
