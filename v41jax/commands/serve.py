"""`v41jax serve`: the OpenAI-compatible server of one checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from scheduler.runtime_config import EngineConfig
from v41jax.commands.engine_options import with_engine_options

KEY_VARIABLE = "V41JAX_API_KEY"


@with_engine_options
def serve(
    model: Annotated[Path, typer.Option("--model", help="Checkpoint directory in the released layout.")],
    engine_config: EngineConfig,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option("--served-model-name", help="Name clients ask for; default: the directory's.")
    ] = None,
    api_key: Annotated[
        list[str] | None, typer.Option("--api-key", help=f"Accepted key; repeatable. Also read from {KEY_VARIABLE}.")
    ] = None,
    max_waiting: Annotated[int, typer.Option("--max-waiting", help="Requests that may wait; more get 429.")] = 1024,
    max_body_bytes: Annotated[int, typer.Option("--max-body-bytes", help="Size of a request body.")] = 32 * 2**20,
    max_choices: Annotated[int, typer.Option("--max-choices", help="Choices of one request.")] = 128,
    request_timeout: Annotated[
        float, typer.Option("--request-timeout", help="Seconds after which a request ends; 0 never.")
    ] = 0.0,
    drain_timeout: Annotated[
        float, typer.Option("--drain-timeout", help="Seconds running requests get when the server stops.")
    ] = 30.0,
    image_directory: Annotated[
        list[Path] | None, typer.Option("--image-directory", help="file: images may be below it; repeatable.")
    ] = None,
    image_origin: Annotated[
        list[str] | None, typer.Option("--image-origin", help="scheme://host[:port] to fetch from; repeatable.")
    ] = None,
    warm_up: Annotated[bool, typer.Option("--warm-up/--no-warm-up", help="Compile before listening.")] = True,
) -> None:
    """Serve a checkpoint over HTTP until interrupted; running requests finish first."""
    try:
        from v41jax.server import ServerOptions, create_app
        from v41jax.server.running import make_server
    except ModuleNotFoundError as error:
        raise ValueError(f"the server needs the package {error.name!r}: install v41jax[server]") from error
    from v41jax.engine import Engine
    from v41jax.image_sources import ImageSources

    variable = os.environ.get(KEY_VARIABLE)
    options = ServerOptions(
        model_name=served_model_name or model.resolve().name,
        api_keys=(*(api_key or ()), *((variable,) if variable else ())),
        max_body_bytes=max_body_bytes,
        max_waiting=max_waiting,
        max_choices=max_choices,
        request_timeout_s=request_timeout,
        drain_timeout_s=drain_timeout,
        image_sources=ImageSources(tuple(image_directory or ()), frozenset(image_origin or ())),
    )
    if warm_up:
        typer.echo(f"loading {options.model_name} and compiling its steps; --no-warm-up compiles at first use", err=True)
    with Engine.from_checkpoint(model, engine_config, warm_up=warm_up) as engine:
        make_server(create_app(engine, options), host, port, announce=True).run()
