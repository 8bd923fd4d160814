"""Engine options as command-line flags, made from the fields of `EngineConfig`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from scheduler.runtime_config import EngineConfig

NOT_FLAGS = frozenset({"mesh", "activation_quantization", "decode_buckets"})
"""Fields with a flag of another form."""


def parse_mesh(text: str) -> dict[str, int]:
    """`data=D,model=M` -> sizes by axis.

    Raises:
      typer.BadParameter: anything else.
    """
    sizes = {"data": 1, "model": 1}
    for part in text.split(","):
        axis, separator, size = part.partition("=")
        if not separator or not size.isdigit():
            raise typer.BadParameter(f"mesh {text!r} must read data=D,model=M")
        sizes[axis.strip()] = int(size)
    return sizes


def parse_buckets(text: str) -> tuple[int, ...]:
    """`1,2,4` -> sizes.

    Raises:
      typer.BadParameter: anything else.
    """
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise typer.BadParameter(f"decode buckets {text!r} must be integers separated by commas") from None


def _option(field: dataclasses.Field[Any]) -> inspect.Parameter:
    name = field.name.replace("_", "-")
    default = field.default
    flags = [f"--{name}/--no-{name}"] if isinstance(default, bool) else [f"--{name}"]
    kinds = {"int": int, "float": float, "str": str, "bool": bool}
    kind: Any = kinds[str(field.type).removesuffix(" | None")]
    if default is None:
        kind = kind | None
    annotation = Annotated[kind, typer.Option(*flags, rich_help_panel="Engine options")]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds every engine option to a command, which receives them as one `engine_config: EngineConfig`."""
    fields = [field for field in dataclasses.fields(EngineConfig) if field.name not in NOT_FLAGS]
    panel = {"rich_help_panel": "Engine options"}
    extra = [
        inspect.Parameter(
            "no_activation_quantization",
            inspect.Parameter.KEYWORD_ONLY,
            default=False,
            annotation=Annotated[bool, typer.Option("--no-activation-quantization", **panel)],
        ),
        inspect.Parameter(
            "mesh",
            inspect.Parameter.KEYWORD_ONLY,
            default="data=1,model=1",
            annotation=Annotated[str, typer.Option("--mesh", help="data=D,model=M", **panel)],
        ),
        inspect.Parameter(
            "decode_buckets",
            inspect.Parameter.KEYWORD_ONLY,
            default="",
            annotation=Annotated[str, typer.Option("--decode-buckets", help="1,2,4,...", **panel)],
        ),
    ]
    own = [
        parameter
        for parameter in inspect.signature(command, eval_str=True).parameters.values()
        if parameter.name != "engine_config"
    ]

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        options = {field.name: values.pop(field.name) for field in fields}
        config = EngineConfig(
            **options,
            activation_quantization=not values.pop("no_activation_quantization"),
            mesh=parse_mesh(values.pop("mesh")),
            decode_buckets=parse_buckets(values.pop("decode_buckets")),
        )
        model = values.get("model")
        if model is not None and (config.coordinator is not None or config.process_id):
            from v41jax.following import follow_checkpoint
            from v41jax.serving_options import in_cluster

            config = in_cluster(model, config)
            if config.process_id:
                follow_checkpoint(model, config)
                return
        command(**values, engine_config=config)

    parameters = [*own, *map(_option, fields), *extra]
    keyword_only = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    wrapper.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in keyword_only}
    return wrapper
