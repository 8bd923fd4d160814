"""`v41jax logits`: logits of every position of one prompt, by the JAX model or by the float64 reference."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import numpy as np
import typer


class Dtype(enum.StrEnum):
    """Activation dtype on the command line."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class ProjectorActivation(enum.StrEnum):
    """Activation of the image aligner."""

    GELU = "gelu"
    GELU_PYTORCH_TANH = "gelu_pytorch_tanh"


class Implementation(enum.StrEnum):
    """Which model computes the logits."""

    JAX = "jax"
    REFERENCE = "reference"


def logits(
    model: Annotated[Path, typer.Option(help="Checkpoint directory in the released layout.")],
    out: Annotated[Path, typer.Option(help="Output .npz; array `logits` [n, vocab] float32.")],
    tokens: Annotated[Path | None, typer.Option(help="Token ids, .npy int32 [n]; with --image its own ids.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Activation dtype.")] = Dtype.BFLOAT16,
    activation_quantization: Annotated[
        bool, typer.Option(help="Fake-quantize activations as the model was trained.")
    ] = True,
    chunks: Annotated[str, typer.Option(help="Rows of each forward, comma separated; the last repeats.")] = "",
    implementation: Annotated[Implementation, typer.Option()] = Implementation.JAX,
    image: Annotated[Path | None, typer.Option(help="Image prompt, .npz with ids, patches, grid and types.")] = None,
    projector_hidden_act: Annotated[
        ProjectorActivation | None, typer.Option(help="The aligner's activation, if not that of config.json.")
    ] = None,
) -> None:
    """Writes the logits of every position of one prompt."""
    import jax.numpy as jnp

    from v41jax.full_forward import full_forward, load_model
    from v41jax.precision import Precision
    from v41jax.prompt_logits import read_prompt, reference_logits

    precision = Precision(jnp.dtype(dtype.value), activation_quantization)
    sizes = parse_chunks(chunks)
    prompt = read_prompt(
        model, tokens, image, precision, None if projector_hidden_act is None else projector_hidden_act.value
    )
    if implementation is Implementation.REFERENCE:
        result = reference_logits(model, prompt, precision, sizes)
    else:
        with load_model(model, precision, max_model_len=len(prompt.ids)) as loaded:
            result = full_forward(
                loaded.params,
                prompt.ids,
                loaded.setup,
                loaded.lookup,
                chunks=sizes,
                image_rows=prompt.rows,
                image_embeddings=prompt.embeddings,
            )
    with open(out, "wb") as file:
        np.savez(file, logits=result)


def parse_chunks(text: str) -> list[int] | None:
    """`33,7,1` -> [33, 7, 1]; an empty text -> None."""
    if not text:
        return None
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--chunks {text!r} is not a comma-separated list of whole numbers") from None
    if min(sizes) < 1:
        raise ValueError(f"--chunks {text!r} holds {min(sizes)}; every chunk has at least 1 row")
    return sizes
