"""The draft model: context windows written after a target forward, and the block of proposals read from them.

Pure functions over `DraftParameters` and the target's `Parameters` (embedding, head and RoPE table are shared). What
is verified and committed is `verification`'s business; nothing here changes what the target emits.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_rows import QuantizedRows
from pallas_kernels.stored_rows import load_rows
from scheduler.pools import Pools
from v41jax.draft_parameters import DraftParameters, draft_text
from v41jax.layers import collectives
from v41jax.layers.attention import (
    KeyMemory,
    Selection,
    attend,
    query_latent,
    window_latents,
    window_rows,
    write_window_keys,
)
from v41jax.layers.hyper_connections import collapse, expand, mixes, sublayer_input
from v41jax.layers.linear import linear, product, quantize_input
from v41jax.layers.moe import codes_read, moe, shared_hidden
from v41jax.layers.norm import rms_norm
from v41jax.layers.rope import at_positions
from v41jax.layers.rows import Requests, Rows
from v41jax.model import ModelSetup, Taps
from v41jax.parameters import LayerWeights, Parameters, layer_of_run
from v41jax.quantization import fake_q8
from v41jax.sampling import SamplingInputs, sample

Array = jax.Array


class DraftRequests(NamedTuple):
    """The requests a block is drafted for, `[R]`.

    Attributes:
      anchors: int32, the newest emitted token; the target has not processed it.
      positions: int32, `a`, of the last token the target has processed and committed; the anchor's is one more.
      slots: int32 state slots; padding 0.
      live: bool, False for padding.
    """

    anchors: Array
    positions: Array
    slots: Array
    live: Array


class DraftBlock(NamedTuple):
    """What was drafted; zeros for padding requests.

    Attributes:
      tokens: [R, T] int32 proposals, by batch position.
      confidence: [R, T] float32 logits of surviving verification if everything before survives; None when not asked
        for.
    """

    tokens: Array
    confidence: Array | None


def check_draft(setup: ModelSetup) -> None:
    """Refuses a model or pools that drafting cannot work with.

    Raises:
      ValueError: with every fault.
    """
    text, geometry = setup.config.text, setup.geometry
    stages = text.num_nextn_predict_layers
    faults = []
    if not stages:
        faults.append("num_nextn_predict_layers is 0: the checkpoint has no draft")
    if not 0 < geometry.speculative_tokens <= text.dspark_block_size:
        faults.append(
            f"speculative_tokens {geometry.speculative_tokens} is outside 1..{text.dspark_block_size}: "
            "the draft was trained on blocks of that width"
        )
    if geometry.draft_layers != stages:
        faults.append(f"the pools hold {geometry.draft_layers} draft windows, the draft has {stages} stages")
    for layer in text.dspark_target_layer_ids:
        if layer in text.engram_layer_ids:
            faults.append(f"dspark_target_layer_ids {layer} is an Engram layer: its tap would miss the Engram's update")
    if any(text.compress_ratios[text.num_hidden_layers :]):
        faults.append(f"compress_ratios of the draft stages are {text.compress_ratios[-stages:]}, must be 0")
    if faults:
        raise ValueError("; ".join(faults))


def committed_requests(pools: Pools, slots: Array, live: Array) -> DraftRequests:
    """The newest tokens and committed positions of slots, from the pools: no host round trip between steps."""
    return DraftRequests(
        anchors=jnp.where(live, pools.last_token[slots], 0),
        positions=jnp.where(live, pools.cursor[slots, 0] - 1, 0),
        slots=slots,
        live=live,
    )


def write_draft_context(draft: DraftParameters, pools: Pools, taps: Taps, slots: Array, *, setup: ModelSetup) -> Pools:
    """Writes the context keys of every row that ran the tapped layers (DSpark specification, "Context keys and the
    ring").

    Args:
      draft: weights.
      pools: request memory; only the draft's rings change.
      taps: of the target forward just run. Rows that its own rings do not keep are not written here either.
      slots: [R] int32 of the batch.
      setup: static.
    """
    text, precision, kernels = setup.config.text, setup.precision, setup.kernels
    projected = linear(quantize_input(taps.features, precision), draft.main_proj, kernels)
    main = rms_norm(projected, draft.main_norm, text.rms_norm_eps)
    quantized = quantize_input(main, precision)

    def stage(carry: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
        rings, place = carry
        weights = layer_of_run(draft.stages, place).attention
        rings = write_window_keys(
            rings,
            window_latents(quantized, weights, kernels),
            weights,
            taps.rows.plain,
            taps.rows,
            slots,
            _ring_offset(pools, setup, place),
            text=text,
            window_format=setup.geometry.window_format,
            kernels=kernels,
        )
        return (rings, place + 1), None

    (rings, _), _ = jax.lax.scan(stage, (_rings(pools), jnp.int32(0)), length=setup.geometry.draft_layers)
    return pools.replace(window=rings.reshape(pools.window.shape))


def draft_block(
    params: Parameters,
    draft: DraftParameters,
    pools: Pools,
    requests: DraftRequests,
    *,
    setup: ModelSetup,
    confidence: bool = True,
    sampling: SamplingInputs | None = None,
) -> DraftBlock:
    """Proposes the tokens that follow each anchor (DSpark specification, "Draft block forward", "Picking the five
    tokens", "Confidence head").

    Reads committed state only and writes nothing: a block's keys are temporaries.

    Args:
      params: the target's weights.
      draft: weights.
      pools: request memory.
      requests: what to draft for.
      setup: static.
      confidence: static; compute the confidence head.
      sampling: [R] parameters, `positions` those of the first proposal. None picks the largest logit; otherwise a
        proposal is drawn with the noise its verification will use, which makes more of them survive.
    """
    hidden = draft_hidden(params, draft, pools, requests, setup)
    return propose(params, draft, requests, hidden, setup=setup, confidence=confidence, sampling=sampling)


def propose(
    params: Parameters,
    draft: DraftParameters,
    requests: DraftRequests,
    hidden: Array,
    *,
    setup: ModelSetup,
    confidence: bool,
    sampling: SamplingInputs | None,
) -> DraftBlock:
    """The proposals of a block from its hidden states, [R * T, D] of `draft_hidden`; other arguments as of
    `draft_block`."""
    width = setup.config.text.dspark_block_size
    count = requests.anchors.shape[0]
    normalized = rms_norm(hidden, draft.norm, setup.config.text.rms_norm_eps)
    # Block position first: the picking below walks over it.
    by_position = hidden.reshape(count, width, -1).swapaxes(0, 1)
    base = product(normalized.reshape(count, width, -1).swapaxes(0, 1), params.head)
    tokens, logits = pick(draft, requests.anchors, base, by_position if confidence else None, sampling)
    live = requests.live[:, None]
    return DraftBlock(
        tokens=jnp.where(live, tokens.T, 0),
        confidence=None if logits is None else jnp.where(live, logits.T, 0),
    )


def pick(
    draft: DraftParameters,
    anchors: Array,
    base: Array,
    hidden: Array | None = None,
    sampling: SamplingInputs | None = None,
) -> tuple[Array, Array | None]:
    """Picks a block left to right, each token with the Markov bias of the one before.

    Args:
      draft: weights.
      anchors: [R] int32.
      base: [T, R, V] float32 logits.
      hidden: [T, R, D] activation dtype, before the norm, for the confidence head; None skips it.
      sampling: see `draft_block`.

    Returns:
      [T, R] int32 tokens, and [T, R] float32 confidence logits or None. One position's biased logits exist at a time.
    """

    token, tokens, confidences = anchors, [], []
    # A few positions, written out: a loop would copy each one's part of the logits out of them and its token back.
    for index in range(base.shape[0]):
        embedding = load_rows(draft.markov_embed, (token,))
        logits = base[index] + product(embedding, draft.markov_head)
        if sampling is None:
            token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        else:
            token = sample(logits, sampling._replace(positions=sampling.positions + index))
        tokens.append(token)
        if hidden is not None:
            joined = jnp.concatenate([hidden[index], embedding.astype(hidden.dtype)], axis=-1)
            confidences.append(product(joined, draft.confidence)[:, 0])
    return jnp.stack(tokens), None if hidden is None else jnp.stack(confidences)


def draft_hidden(
    params: Parameters, draft: DraftParameters, pools: Pools, requests: DraftRequests, setup: ModelSetup
) -> Array:
    """Collapsed hidden states before the norm, [R * T, D], block positions of a request together."""
    text = setup.config.text
    width, count = text.dspark_block_size, requests.anchors.shape[0]
    noise = jnp.full((count, width - 1), text.dspark_noise_token_id, jnp.int32)
    ids = jnp.concatenate([requests.anchors[:, None], noise], axis=1).reshape(-1)
    embedded = collectives.join_columns(load_rows(params.embed, (ids,)), setup.parallel)
    embedded = embedded.astype(setup.precision.activation_dtype)
    streams = jnp.broadcast_to(embedded[:, None, :], (ids.size, text.hc_mult, embedded.shape[1]))
    pre_mix = jnp.zeros((ids.size, text.hc_mult), jnp.float32).at[:, 0].set(1.0)
    rows = block_rows(params, requests, setup)

    def stage(carry: tuple[Array, Array, Array], _: None) -> tuple[tuple[Array, Array, Array], None]:
        streams, pre_mix, place = carry
        # Indexed here and not scanned over: kernels read a stage in its stack, a scan would copy all of its experts.
        weights, offset = layer_of_run(draft.stages, place), _ring_offset(pools, setup, place)
        return (*draft_stage(weights, streams, pre_mix, rows, requests, pools, offset, setup), place + 1), None

    carry = (streams, pre_mix, jnp.int32(0))
    (streams, pre_mix, _), _ = jax.lax.scan(stage, carry, length=setup.geometry.draft_layers)
    return collapse(streams, pre_mix)


def block_rows(params: Parameters, requests: DraftRequests, setup: ModelSetup) -> Rows:
    """The `R * T` rows of the blocks.

    `positions` is the last context position `a` for all of them, because that is where every query's window ends; the
    angles are those of the rows' own positions `a + 1 ..`.
    """
    width, count = setup.config.text.dspark_block_size, requests.anchors.shape[0]
    last = jnp.repeat(requests.positions, width)
    own = (requests.positions[:, None] + 1 + jnp.arange(width, dtype=jnp.int32)).reshape(-1)
    nothing = jnp.zeros(count * width, bool)
    zeros = jnp.zeros(count * width, jnp.int32)
    angles = at_positions(params.plain, own)
    return Rows(
        positions=last,
        batch_ids=jnp.repeat(jnp.where(requests.live, jnp.arange(count, dtype=jnp.int32), -1), width),
        image_rows=nothing,
        engram_rows=nothing,
        window_floor=zeros,
        in_forward_from=last + 1,
        in_forward_row=zeros,
        ring_rows=nothing,
        plain=angles,
        yarn=angles,
    )


def draft_stage(
    weights: LayerWeights,
    streams: Array,
    pre_mix: Array,
    rows: Rows,
    requests: DraftRequests,
    pools: Pools,
    ring_offset: Array | int,
    setup: ModelSetup,
) -> tuple[Array, Array]:
    """One stage: a window-only layer whose rows all see the context window and every key of their own block.

    Args:
      weights: of the stage, of `layer_of_run` where it is one of a stack.
      streams: [R * T, S, D] activation dtype.
      pre_mix: [R * T, S] float32.
      rows: from `block_rows`.
      requests: of the block.
      pools: the stage's rings are read.
      ring_offset: first ring of the stage.
      setup: static.

    Returns:
      Streams and pre-mix after the stage.
    """
    text, precision, kernels = draft_text(setup.config.text), setup.precision, setup.kernels
    inputs = sublayer_input(streams, pre_mix, weights.attn_norm, text, precision, kernels)
    coefficients = mixes(streams, weights.attn_mix, text, kernels, after=inputs)
    output = _attention(weights, inputs, rows, requests, pools, ring_offset, setup)
    streams = expand(output, streams, coefficients)

    codes = codes_read(weights.moe)
    inputs = sublayer_input(streams, coefficients.pre, weights.ffn_norm, text, precision, kernels, codes=codes)
    hidden = shared_hidden(inputs, weights.moe.shared, text, precision, kernels)
    ffn = mixes(streams, weights.ffn_mix, text, kernels, after=hidden)
    output, _ = moe(
        inputs,
        hidden,
        weights.moe,
        rows.image_rows,
        rows.batch_ids >= 0,
        text=text,
        precision=precision,
        kernels=kernels,
        parallel=setup.parallel,
    )
    return expand(output, streams, ffn), ffn.pre


def _attention(
    weights: LayerWeights,
    inputs: QuantizedRows,
    rows: Rows,
    requests: DraftRequests,
    pools: Pools,
    ring_offset: Array | int,
    setup: ModelSetup,
) -> Array:
    """Context window from the ring, block keys as the entries of one small page a request."""
    text, precision, kernels = setup.config.text, setup.precision, setup.kernels
    width, count = text.dspark_block_size, requests.anchors.shape[0]
    latent = query_latent(inputs, weights.attention, text, precision, kernels)
    keys = window_rows(inputs, weights.attention, rows.plain, text, kernels)
    if precision.activation_quantization:
        keys = fake_q8(keys)
    entries = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (count * width, width))
    memory = KeyMemory(
        selection=Selection(entries, jnp.full(count * width, width, jnp.int32)),
        main=keys.reshape(count, width, -1),
        window=_rings(pools),
        ring_offset=ring_offset,
    )
    partial = attend(
        latent,
        keys[:0],
        weights.attention,
        rows,
        Requests(requests.slots, jnp.arange(count, dtype=jnp.int32)[:, None]),
        memory,
        ratio=0,
        text=text,
        precision=precision,
        main_format="float",
        window_format=setup.geometry.window_format,
        kernels=kernels,
    )
    return collectives.sum_over_model(partial, setup.parallel)


def _rings(pools: Pools) -> Array:
    """Rings of all layers as one axis: layer times slots plus slot."""
    return pools.window.reshape(-1, *pools.window.shape[2:])


def _ring_offset(pools: Pools, setup: ModelSetup, place: Array) -> Array:
    """First ring of a stage, int32 scalar; the draft's windows follow the backbone's."""
    return (setup.geometry.layers + place) * pools.window.shape[1]
