"""The forward without a scheduler: one private request, any chunking, logits of every row.

For notebooks and comparisons. It builds the same steps and runs the same `forward` as serving does.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from checkpoints.engram_tables import EngramTables
from checkpoints.load import Checkpoint
from scheduler.batch import EngramRows
from scheduler.pool_geometry import V41PoolGeometry
from scheduler.pools import Pools, allocate
from v41jax.config import ModelConfig
from v41jax.engram_hashing import history_before
from v41jax.engram_lookup import EngramLookup
from v41jax.layers.collectives import ONE_CHIP, Parallel
from v41jax.mesh_forward import mesh_forward
from v41jax.model import ForwardOutput, ModelSetup, Record, forward
from v41jax.parameters import Parameters, WeightForm, load_parameters
from v41jax.precision import Precision
from v41jax.sharding import check_mesh, make_mesh
from v41jax.spans import Span, batch_of
from v41jax.token_map import load_token_map

ROW_BUCKETS = (16, 64, 256, 1024)
"""Rows of a compiled step; chunks are padded to the next one, and longer ones are split."""

step = jax.jit(forward, static_argnames=("setup", "phase", "record"), donate_argnames=("pools",))
"""`forward`, compiled once per setup and bucket."""


@functools.cache
def mesh_step(parallel: Parallel) -> Any:
    """`mesh_forward` on the first devices, compiled once per setup and bucket."""
    # Not donated: pools arrive on one device, and cannot be reused by many.
    return jax.jit(functools.partial(mesh_forward, mesh=make_mesh(parallel)), static_argnames=("setup", "phase"))


def geometry_of(
    config: ModelConfig,
    precision: Precision,
    *,
    packed: bool = False,
    index_format: str = "fp4",
    block_size: int | None = None,
    speculative_tokens: int = 0,
) -> V41PoolGeometry:
    """Pool geometry of a configuration.

    Args:
      config: of the checkpoint.
      precision: with activation quantization off, every row holds unquantized activations.
      packed: FP4 main rows and FP8 window rows.
      index_format: "fp4", the arithmetic the model was trained with, or "fp8".
      block_size: tokens of a page; None is the smallest legal one that holds whole candidate blocks.
      speculative_tokens: drafted tokens of a verify step.
    """
    text = config.text
    if block_size is None:
        block = text.candidate_block_size if text.candidate_source_layer_id >= 0 else 1
        block_size = math.lcm(32, *(ratio * block for _, ratio in config.owners))
    unquantized = None if precision.activation_quantization else jnp.dtype(precision.activation_dtype).name
    return V41PoolGeometry(
        layers=text.num_hidden_layers,
        owners=config.owners,
        block_size=block_size,
        window_size=text.sliding_window,
        head_dim=text.head_dim,
        index_dim=text.index_head_dim,
        history_size=text.engram_max_ngram_size - 1,
        packed=packed,
        index_format=index_format,
        speculative_tokens=speculative_tokens,
        layer_ratios=text.compress_ratios,
        index_topk=text.index_topk,
        unquantized_dtype=unquantized,
        draft_layers=text.num_nextn_predict_layers,
    )


@dataclasses.dataclass
class LoadedModel:
    """An open checkpoint with its weights on the device; a context manager that closes the files.

    Attributes:
      checkpoint: open.
      params: weights.
      setup: what the forward is specialized on.
      lookup: Engram rows; None without Engram layers.
      max_model_len: positions the RoPE tables cover.
    """

    checkpoint: Checkpoint
    params: Parameters
    setup: ModelSetup
    lookup: EngramLookup | None
    max_model_len: int
    _tables: EngramTables | None = None

    def __enter__(self) -> LoadedModel:
        return self

    def __exit__(self, *_: object) -> None:
        if self._tables is not None:
            self._tables.close()
        self.checkpoint.close()


def load_model(
    directory: Path,
    precision: Precision | None = None,
    *,
    max_model_len: int = 4096,
    form: WeightForm = "dequantized",
    kernels: str = "auto",
    token_map: NDArray[np.int32] | None = None,
    parallel: Parallel = ONE_CHIP,
    **geometry: Any,
) -> LoadedModel:
    """Opens a checkpoint directory and loads its text weights.

    Args:
      directory: in the released layout.
      precision: rounding choices; None is the released ones.
      max_model_len: positions the RoPE tables cover.
      form: of the weights.
      kernels: implementation of the operations.
      token_map: Engram token map; None reads the directory's own.
      parallel: mesh that the weights are cut over; its `data` must be 1.
      **geometry: arguments of `geometry_of`.
    """
    precision = Precision() if precision is None else precision
    checkpoint = Checkpoint.open(Path(directory), scopes=("text",))
    config = checkpoint.config
    tables = lookup = None
    try:
        if config.text.engram_layer_ids:
            token_map = load_token_map(checkpoint.directory, config) if token_map is None else token_map
            tables = EngramTables.open(checkpoint)
            lookup = EngramLookup(config, token_map, tables)
        if parallel == ONE_CHIP:
            params = load_parameters(
                checkpoint, max_model_len=max_model_len, form=form, dtype=precision.activation_dtype
            )
        else:
            params = _load_on_mesh(checkpoint, parallel, max_model_len, form, precision)
    except BaseException:
        if tables is not None:
            tables.close()
        checkpoint.close()
        raise
    setup = ModelSetup(config, geometry_of(config, precision, **geometry), precision, kernels, parallel=parallel)
    return LoadedModel(checkpoint, params, setup, lookup, max_model_len, tables)


def _load_on_mesh(
    checkpoint: Checkpoint, parallel: Parallel, max_model_len: int, form: WeightForm, precision: Precision
) -> Parameters:
    from v41jax.mesh_runner import load_on_mesh

    if parallel.data != 1:
        raise ValueError(f"a mesh with data={parallel.data}: one request lives on one data shard, so it must be 1")
    check_mesh(checkpoint.config, parallel)
    return load_on_mesh(
        checkpoint,
        make_mesh(parallel),
        parallel,
        max_model_len=max_model_len,
        form=form,
        dtype=precision.activation_dtype,
    )


def engram_rows_of(setup: ModelSetup, lookup: EngramLookup | None, batch: Any) -> EngramRows:
    """Table rows of a step; none for a model without Engram layers."""
    return EngramRows((), ()) if lookup is None else lookup.step_rows(batch)


def compressed_of(
    lookup: EngramLookup | None, token_ids: NDArray, image_rows: NDArray[np.bool_] | None
) -> NDArray[np.int32]:
    """Engram ids of tokens; zeros (nobody reads them) for a model without Engram layers."""
    if lookup is None:
        return np.zeros(len(token_ids), np.int32)
    return lookup.hasher.compress(token_ids, image_rows)


def split_rows(total: int, chunks: Sequence[int] | None) -> list[int]:
    """Lengths of the steps of a prompt: the chunks, the last repeated as long as needed, none above the largest
    bucket."""
    sizes: list[int] = []
    position = 0
    given = list(chunks) if chunks else [total]
    if min(given) < 1:
        raise ValueError(f"chunk lengths {given} must be at least 1")
    while position < total:
        wanted = given[min(len(sizes), len(given) - 1)]
        sizes.append(min(wanted, total - position, ROW_BUCKETS[-1]))
        position += sizes[-1]
    return sizes


def full_forward(
    params: Parameters,
    token_ids: ArrayLike,
    setup: ModelSetup,
    lookup: EngramLookup | None,
    *,
    chunks: Sequence[int] | None = None,
    image_rows: ArrayLike | None = None,
    image_embeddings: ArrayLike | None = None,
    record: bool = False,
) -> NDArray[np.float32] | tuple[NDArray[np.float32], list[Record]]:
    """Logits of every position of one prompt.

    Args:
      params: weights; their RoPE tables must cover the prompt.
      token_ids: [n] int32.
      setup: what the forward is specialized on.
      lookup: Engram rows; None without Engram layers.
      chunks: rows of each forward; the last length repeats. None is as few forwards as the buckets allow.
      image_rows: [n] bool, rows of image spans, delimiters included.
      image_embeddings: [image rows, D] in row order.
      record: also return the `Record` of every chunk (its padding rows included).

    Returns:
      [n, V] float32, and the records when asked for.

    Raises:
      ValueError: an empty prompt, one longer than the RoPE tables, images that do not fit it, or records on a mesh.
    """
    if record and setup.parallel != ONE_CHIP:
        raise ValueError("a forward on a mesh keeps no records")
    ids = np.asarray(token_ids, np.int32)
    limit = params.plain.cos.shape[0]
    if ids.ndim != 1 or not 0 < ids.size <= limit:
        raise ValueError(f"token_ids has shape {ids.shape}: it must be [n] with 1 <= n <= {limit} (max_model_len)")
    image = np.zeros(ids.size, bool) if image_rows is None else np.asarray(image_rows, bool)
    embeddings = None
    if image.any():
        given = np.asarray(image_embeddings, np.float32)
        if len(given) != image.sum():
            raise ValueError(f"{len(given)} image embeddings for {image.sum()} image rows")
        embeddings = np.zeros((ids.size, given.shape[1]), np.float32)
        embeddings[image] = given
    geometry = setup.geometry
    pages = geometry.pages_for(ids.size)
    pools: Pools = allocate(geometry, pages, 1)
    compressed = compressed_of(lookup, ids, image)
    logits, records = [], []
    start = 0
    for length in split_rows(ids.size, chunks):
        stop = start + length
        span = Span(
            start=start,
            token_ids=ids[start:stop],
            compressed_ids=compressed[start:stop],
            slot=0,
            pages=range(pages),
            history=history_before(compressed, start, geometry.history_size),
            image_rows=image[start:stop],
            is_final=stop == ids.size,
        )
        rows = next(bucket for bucket in ROW_BUCKETS if bucket >= length)
        batch = batch_of([span], geometry, rows=rows)
        replaced = None
        if embeddings is not None:
            replaced = np.zeros((rows, embeddings.shape[1]), np.float32)
            replaced[:length] = embeddings[start:stop]
        output: ForwardOutput
        run = functools.partial(step, record=record) if setup.parallel == ONE_CHIP else mesh_step(setup.parallel)
        pools, output = run(
            params,
            pools,
            batch,
            engram_rows_of(setup, lookup, batch),
            setup=setup,
            phase="prefill",
            image_embeddings=replaced,
        )
        logits.append(np.asarray(output.logits)[:length])
        records.append(output.record)
        start = stop
    result = np.concatenate(logits)
    return (result, records) if record else result
