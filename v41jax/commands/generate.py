"""`v41jax generate`: prompts in, tokens and text out."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scheduler.runtime_config import EngineConfig
from scheduler.sequence import SamplingParams
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
    requests = [{"prompt": prompt}] if prompts is None else read_prompts(prompts)

    from v41jax.engine import Engine

    if engine_config.vision == "auto" and not any(request.get("images") for request in requests):
        engine_config = dataclasses.replace(engine_config, vision="off")
    with Engine.from_checkpoint(model, engine_config, warm_up=False) as engine:
        results = engine.generate([_prompt(engine, {**defaults, **request}, ignore_eos) for request in requests])
        for index, result in enumerate(results):
            print(json.dumps(_record(index, result)) if as_json else _readable(result, len(results)))
        sys.stdout.flush()
        print(json.dumps({**engine.summary(), **engine.statistics()}), file=sys.stderr)


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Reads and checks a prompts file.

    Raises:
      PromptsError: with every malformed line.
    """
    requests, faults = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            request = json.loads(line)
        except ValueError as error:
            faults.append(f"{path}:{number}: not JSON: {error}")
            continue
        if not isinstance(request, dict):
            faults.append(f"{path}:{number}: a line must hold a JSON object")
            continue
        unknown = sorted(set(request) - _KEYS)
        if unknown:
            faults.append(f"{path}:{number}: unknown keys {', '.join(unknown)}; known are {', '.join(sorted(_KEYS))}")
        if ("prompt" in request) == ("tokens" in request):
            faults.append(f"{path}:{number}: give either prompt (text) or tokens (list of ids)")
        images = request.get("images", [])
        if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
            faults.append(f"{path}:{number}: images {images!r} must be a list of file names")
        for key, kinds, least in (
            ("max_tokens", int, 1),
            ("arrival_step", int, 0),
            ("temperature", (int, float), 0),
            ("seed", int, 0),
        ):
            value = request.get(key)
            if value is not None and (isinstance(value, bool) or not isinstance(value, kinds) or value < least):
                faults.append(f"{path}:{number}: {key} {value!r} must be a number of at least {least}")
        requests.append(request)
    if not requests and not faults:
        faults.append(f"{path}: no prompt in it")
    if faults:
        raise PromptsError(faults)
    return requests


def _prompt(engine: Engine, request: dict[str, Any], ignore_eos: bool) -> Prompt:
    sampling = SamplingParams(
        ignore_eos=ignore_eos,
        **{field: request[field] for field in _SAMPLING if field in request},
    )
    content = request.get("tokens") if request.get("prompt") is None else request["prompt"]
    if request.get("images"):
        files = [Path(name).read_bytes() for name in request["images"]]
        prompt = engine.prompt_with_images(content, files, sampling)
    else:
        prompt = engine.prompt(content, sampling)
    return dataclasses.replace(prompt, arrival_step=request.get("arrival_step") or 0)


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
