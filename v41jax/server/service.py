"""What every route shares: the engine, the options, the memory of replies, and the worker that encodes prompts."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from v41jax.engine import Engine
from v41jax.protocol import ReplyMemory
from v41jax.protocol.errors import Fault, ProtocolError, shorten
from v41jax.protocol.tokens import DSML, THINK_CLOSE
from v41jax.server.errors import ApiError, engine_failed
from v41jax.server.limits import ServerOptions
from v41jax.server.metrics import Metrics
from v41jax.tokenizer import Tokenizer

if TYPE_CHECKING:
    from v41jax.server.constraint import GrammarConstraint, Grammars
    from v41jax.server.grammars import ReplyGrammar

Result = TypeVar("Result")


class Service:
    """State of one server.

    Attributes:
      engine: generates.
      options: of the server.
      tokenizer: of the checkpoint.
      replies: replies whose ids differ from what their text encodes to; used on the encoding worker only.
      metrics: of this server.
      started: time of start, seconds since the epoch.
      draining: no new request is accepted.

    Raises:
      ValueError: the checkpoint has no tokenizer.
    """

    def __init__(self, engine: Engine, options: ServerOptions):
        if engine.tokenizer is None:
            raise ValueError("this checkpoint has no tokenizer.json: a server needs one, `v41jax generate` does not")
        self.engine = engine
        self.options = options
        self.tokenizer: Tokenizer = engine.tokenizer
        self.replies = ReplyMemory()
        self.metrics = Metrics(engine.statistics)
        self.started = int(time.time())
        self.draining = False
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="v41jax-encode")
        engine.max_waiting = options.max_waiting

    @property
    def max_model_len(self) -> int:
        """Tokens of one request at most."""
        return int(self.engine.core.scheduler.max_model_len)

    @property
    def vocabulary(self) -> int:
        """Token ids are below it: the model has a row for each, and the tokenizer bytes."""
        return min(int(self.engine.core.runner.setup.config.text.vocab_size), self.tokenizer.vocab_size)

    @functools.cached_property
    def grammars(self) -> Grammars:
        """Compiles grammars; made at first use, on the encoding worker."""
        from v41jax.server.constraint import Grammars

        return Grammars(self.tokenizer, int(self.engine.core.runner.setup.config.text.vocab_size))

    def constraint(
        self, grammar: ReplyGrammar | None, *, starts_in_reasoning: bool = False
    ) -> GrammarConstraint | None:
        """A grammar compiled; with reasoning it begins after the reasoning, which may not end the reply.

        Raises:
          ProtocolError: it does not compile.
        """
        if grammar is None:
            return None
        control = self.tokenizer.control_id
        after = control(THINK_CLOSE) if starts_in_reasoning else None
        return self.grammars.compile(grammar, after=after, kept_out=(*self.tokenizer.stop_ids, control(DSML)))

    async def encode(self, work: Callable[[], Result]) -> Result:
        """Runs work on prompts and replies off the event loop, one piece at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def accept(self) -> None:
        """Whether a new generation may begin.

        Raises:
          ApiError: the server stops, or its engine failed.
        """
        if self.engine.failure is not None:
            raise engine_failed()
        if self.draining:
            raise ApiError(
                503,
                "the server is stopping: send the request to another",
                code="draining",
                headers={"Retry-After": "5"},
            )

    def check_model(self, body: dict[str, Any]) -> None:
        """The requested model is the served one; absent is fine.

        Raises:
          ProtocolError: not a name.
          ApiError: 404 for another model.
        """
        name = body.get("model")
        if name is None:
            return
        if not isinstance(name, str):
            raise ProtocolError([Fault("model", f"must be a string, got {shorten(name)}")])
        self.require_model(name)

    def require_model(self, name: str) -> None:
        """Raises `ApiError` 404 unless the name is the served model's."""
        if name != self.options.model_name:
            raise ApiError(
                404,
                f"the model {shorten(name)} does not exist here: this server has {self.options.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def close(self) -> None:
        """Ends the encoding worker."""
        self._worker.shutdown(wait=True, cancel_futures=True)
