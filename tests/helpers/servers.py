"""A real server for tests: a small checkpoint with the model family's tokenizer, uvicorn in a thread."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai

from checkpoints.synthesize import synthesize
from scheduler.buckets import Buckets, StepShape
from scheduler.runtime_config import EngineConfig
from scheduler.scheduled_batch import ScheduledBatch
from scheduler.sequence import SamplingParams
from tests.helpers.golden import GOLDEN
from tests.helpers.tokenizers import small_definition, small_tokenizer
from v41jax.config import ModelConfig
from v41jax.engine import Engine
from v41jax.protocol.tokens import IMAGE
from v41jax.server import ServerOptions, create_app
from v41jax.server.running import DrainingServer, make_server

MODEL = "small"
PAGE = 32
VOCABULARY = small_tokenizer().vocab_size
IMAGE_ID = small_tokenizer().control_id(IMAGE)
CONFIG = EngineConfig(
    dtype="float32",
    activation_quantization=False,
    kv_cache_block_size=PAGE,
    max_num_batched_tokens=256,
    max_num_seqs=4,
    max_model_len=1024,
    decode_buckets=(4,),
    num_pages=160,
    decoder_swa_bounded_replay=False,
    prompt_logprobs=True,
)


class FewShapes(Buckets):
    """Two shapes of prefill steps and one of decode steps: compiling is what costs here."""

    def shape(self, batch: ScheduledBatch) -> StepShape:
        """As the ladders have it, with room for an output of every request."""
        shape = super().shape(batch)
        return shape._replace(outputs=shape.requests)


FEW = FewShapes(
    decode_requests=(4,), prefill_rows=(64, 256), prefill_requests=(4, 4), prefill_pages=(32,), decode_pages=(32,)
)


def small_config() -> ModelConfig:
    """The five golden layers with the small vocabulary."""
    config = json.loads((GOLDEN / "five-layer" / "config.json").read_text())
    config["image_token_id"] = IMAGE_ID
    config["text_config"] |= {"vocab_size": VOCABULARY, "engram_compressed_vocab_size": 5000}
    return ModelConfig.from_dict(config)


def write_checkpoint(directory: Path, scopes: tuple[str, ...] = ("text", "vision")) -> Path:
    """Random weights for `small_config`, with the tokenizer it is made for."""
    file = directory.with_name(f"{directory.name}.tokenizer.json")
    file.write_text(json.dumps(small_definition()), encoding="utf-8")
    synthesize(directory, small_config(), seed=5, scopes=scopes, tokenizer=file)
    return directory


def open_engine(directory: Path, config: EngineConfig = CONFIG) -> Engine:
    """An engine with few programs, some of them compiled."""
    engine = Engine.from_checkpoint(directory, config, warm_up=False)
    engine.core.buckets = FEW
    engine.generate([engine.prompt("Compile.", SamplingParams(max_tokens=2, ignore_eos=True))])
    return engine


@dataclasses.dataclass
class RunningServer:
    """A server that answers.

    Attributes:
      url: of it.
      engine: behind it.
      server: to stop it.
    """

    url: str
    engine: Engine
    server: DrainingServer

    def client(self, key: str = "unused", **options: object) -> openai.OpenAI:
        """OpenAI's client of it."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=600, **options)

    def http(self, **options: object) -> httpx.Client:
        """A plain client of it."""
        return httpx.Client(base_url=self.url, timeout=600, **options)

    def wait_until_idle(self, seconds: float = 120) -> dict[str, object]:
        """Statistics of the engine once nothing runs."""
        end = time.monotonic() + seconds
        while self.engine.core.has_work or self.engine.statistics()["live"]:
            assert time.monotonic() < end, self.engine.statistics()
            time.sleep(0.02)
        return self.engine.statistics()


@contextlib.contextmanager
def running(engine: Engine, **options: object) -> Iterator[RunningServer]:
    """Serves an engine on a free port until the block ends."""
    server = make_server(create_app(engine, ServerOptions(model_name=MODEL, **options)), "127.0.0.1", 0)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield RunningServer(f"http://127.0.0.1:{port}", engine, server)
    finally:
        server.stop()
        thread.join()
