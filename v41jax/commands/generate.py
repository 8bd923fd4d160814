"""`v41jax generate`: prompts in, tokens and text out."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scheduler.runtime_config import EngineConfig
from scheduler.sequence import SamplingError, SamplingParams
from v41jax.commands.engine_options import with_engine_options

if TYPE_CHECKING:
    from v41jax.engine import Engine, Generation, Prompt

_SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
_KEYS = {"prompt", "tokens", "images", "arrival_step", *_SAMPLING}


class PromptsError(ValueError):
    """A prompts file with malformed lines; `faults` holds one line each."""

    def __init__(self, faults: list[str]):
        self.faults = tuple(faults)
        super().__init__("; ".join(faults))


@with_engine_options
def generate(
    model: Annotated[Path, typer.Option("--model", help="Checkpoint directory in the released layout.")],
    engine_config: EngineConfig,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Prompt text.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help="JSON lines: prompt or tokens, images (files), and options."),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Generated tokens at most.")] = 16,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option("--seed", help="Of every request without its own.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Generate past the end token.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, in input order.")] = False,
) -> None:
    """Generate from one prompt or from a file of them."""
    if (prompt is None) == (prompts is None):
        raise typer.BadParameter("give either --prompt TEXT or --prompts FILE.jsonl")
    defaults = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    SamplingParams(**defaults)
    requests = {"--prompt": {"prompt": prompt}} if prompts is None else located_prompts(prompts)

    from v41jax.engine import Engine

    if engine_config.vision == "auto" and not any(request.get("images") for request in requests.values()):
        engine_config = dataclasses.replace(engine_config, vision="off")
    with Engine.from_checkpoint(model, engine_config, warm_up=False) as engine:
        results = engine.generate(engine_prompts(engine, requests, defaults, ignore_eos))
        for index, result in enumerate(results):
            print(json.dumps(_record(index, result)) if as_json else _readable(result, len(results)))
        sys.stdout.flush()
        print(json.dumps({**engine.summary(), **engine.statistics()}), file=sys.stderr)


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """The requests of a prompts file, in order; raises as `located_prompts`."""
    return list(located_prompts(path).values())


def located_prompts(path: Path) -> dict[str, dict[str, Any]]:
    """Reads and checks a prompts file.

    Returns:
      The requests in order, each under the place that errors name, `FILE:LINE`. A null is an absent option.

    Raises:
      PromptsError: with every fault of every line.
      OSError: the file cannot be read.
    """
    requests: dict[str, dict[str, Any]] = {}
    faults = []
    # Lines end at \n alone: JSON text may hold the other separators that `splitlines` knows.
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            request = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            faults.append(f"{place}: not JSON: {error}")
            continue
        if not isinstance(request, dict):
            faults.append(f"{place}: a line must hold a JSON object")
            continue
        requests[place] = {key: value for key, value in request.items() if value is not None}
        faults += [f"{place}: {fault}" for fault in _line_faults(requests[place])]
    if not requests and not faults:
        faults.append(f"{path}: no prompt in it")
    if faults:
        raise PromptsError(faults)
    return requests


def _line_faults(request: dict[str, Any]) -> Iterator[str]:
    unknown = sorted(set(request) - _KEYS)
    if unknown:
        yield f"unknown keys {', '.join(unknown)}; known are {', '.join(sorted(_KEYS))}"
    if ("prompt" in request) == ("tokens" in request):
        yield "give either prompt (text) or tokens (list of ids)"
    if not isinstance(request.get("prompt", ""), str):
        yield f"prompt {request['prompt']!r} must be text"
    tokens = request.get("tokens", [0])
    if not isinstance(tokens, list) or not all(_is_whole(token) for token in tokens):
        yield "tokens must be a list of token ids"
    elif not tokens:
        yield "tokens is empty: give at least one id"
    images = request.get("images", [])
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        yield f"images {images!r} must be a list of file names"
    arrival = request.get("arrival_step", 0)
    if not _is_whole(arrival) or arrival < 0:
        yield f"arrival_step {arrival!r} must be a whole number of at least 0"
    try:
        SamplingParams(**{field: request[field] for field in _SAMPLING if field in request})
    except SamplingError as error:
        yield from error.faults


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def engine_prompts(
    engine: Engine, requests: Mapping[str, Mapping[str, Any]], defaults: Mapping[str, Any], ignore_eos: bool
) -> list[Prompt]:
    """Requests as the engine takes them.

    Args:
      engine: that will run them.
      requests: by the place that errors name.
      defaults: options of requests without their own.
      ignore_eos: generate past the end token.

    Raises:
      PromptsError: with every request that the engine's model cannot take.
    """
    prompts, faults = [], []
    for place, request in requests.items():
        try:
            prompts.append(_prompt(engine, {**defaults, **request}, ignore_eos))
        except OSError as error:
            faults.append(f"{place}: {error.filename}: {error.strerror}")
        except ValueError as error:
            faults.append(f"{place}: {error}")
    if faults:
        raise PromptsError(faults)
    return prompts


def _prompt(engine: Engine, request: Mapping[str, Any], ignore_eos: bool) -> Prompt:
    sampling = SamplingParams(
        ignore_eos=ignore_eos,
        **{field: request[field] for field in _SAMPLING if field in request},
    )
    content = request["prompt"] if "prompt" in request else request["tokens"]
    if request.get("images"):
        files = [Path(name).read_bytes() for name in request["images"]]
        prompt = engine.prompt_with_images(content, files, sampling)
    else:
        prompt = engine.prompt(content, sampling)
    return dataclasses.replace(prompt, arrival_step=request.get("arrival_step", 0))


def _record(index: int, result: Generation) -> dict[str, Any]:
    return {
        "index": index,
        "tokens": list(result.tokens),
        "text": result.text,
        "finish_reason": result.finish_reason,
        "cached_tokens": result.cached_tokens,
        "time_to_first_token_s": result.time_to_first_token_s,
        "time_s": result.time_s,
    }


def _readable(result: Generation, count: int) -> str:
    body = result.text or " ".join(map(str, result.tokens))
    return body if count == 1 else f"[{result.finish_reason}] {body}"
