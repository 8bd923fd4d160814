"""The router's scores, its ties and biases, and the order of their codes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backend
from tests.helpers.models import model
from v41jax.layers.hyper_connections import sublayer_input
from v41jax.layers.moe import RouterWeights, codes_read, moe, route, router_logits, shared_hidden
from v41jax.layers.stacks import OfRun
from v41jax.parameters import layer_weights
from v41jax.presets import preset

TEXT = dataclasses.replace(preset("v4.1-flash").text, num_experts_per_tok=2, n_routed_experts=4)
NO_IMAGE = jnp.zeros(1, bool)


def routed(logits, bias=(0, 0, 0, 0), bias_vl=(0, 0, 0, 0), image=NO_IMAGE, **changes):
    """Routes one row whose router logits are given."""
    weights = RouterWeights(jnp.asarray(logits, jnp.float32)[:, None], jnp.asarray(bias), jnp.asarray(bias_vl))
    return route(jnp.ones((1, 1), jnp.float32), weights, image, dataclasses.replace(TEXT, **changes))


@pytest.mark.parametrize(
    ("logit", "score"),
    [
        (-30, 3.05902e-07),
        (-20, 4.53999e-05),
        (-1, 0.559698),
        (0, 0.832555),
        (1, 1.145976),
        (20, 4.472136),
        (25, 5.0),
    ],
)
def test_scores_are_the_published_ones(logit, score):
    weights = routed([logit, -40, -40, -40], norm_topk_prob=False, routed_scaling_factor=1.0).weights
    assert np.isclose(weights[0, 0], score, rtol=2e-6)


@pytest.mark.parametrize(("rows", "implementation"), [(3, "xla"), (3, "pallas"), (200, "pallas")])
def test_router_logits_of_a_layer_of_a_run_are_not_rounded(rows, implementation):
    random = np.random.default_rng(rows)
    x = jnp.asarray(random.normal(size=(rows, 64)), jnp.bfloat16)
    run = jnp.asarray(random.normal(size=(3, 24, 64)), jnp.bfloat16).at[np.array([0, 2])].set(jnp.nan)
    found = jax.jit(router_logits, static_argnames="kernels")(x, OfRun(run, jnp.int32(1)), kernels=implementation)
    wanted = np.asarray(x, np.float64) @ np.asarray(run[1], np.float64).T
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, wanted, rtol=3e-6, atol=3e-5)
    wide = router_logits(x.astype(jnp.float32), OfRun(run.astype(jnp.float32), jnp.int32(1)), implementation)
    np.testing.assert_allclose(wide, wanted, rtol=3e-6, atol=3e-5)


@pytest.mark.parametrize(("rows", "kernel"), [(1, False), (2, True), (128, True), (129, False)])
def test_few_rows_on_a_gpu_read_the_router_s_weight_in_its_run(rows, kernel):
    x, run = jnp.zeros((rows, 64), jnp.bfloat16), OfRun(jnp.zeros((3, 24, 64), jnp.bfloat16), jnp.int32(1))
    for generation, expected in (("cuda", kernel), ("v6e", False)):
        route = "triton" if generation == "cuda" else "tpu"
        with backend.use_target(backend.Target(route, generation)):
            traced = str(jax.make_jaxpr(lambda *given: router_logits(*given, "auto"))(x, run))
        assert ("pallas_call" in traced) == expected
        assert ("dynamic_slice" in traced) != expected, "a slice in front of a product is a copy"


def test_a_widened_router_is_not_reported_as_a_product_that_was_asked_of_xla():
    run, chosen = OfRun(jnp.zeros((3, 24, 64), jnp.bfloat16), jnp.int32(1)), {}
    with backend.use_target(backend.Target("triton", "cuda")), backend.recording(chosen):
        jax.eval_shape(lambda x: router_logits(x, run, "auto"), jnp.zeros((2, 64), jnp.float32))
        assert not chosen
        jax.eval_shape(lambda x: router_logits(x, run, "auto"), jnp.zeros((2, 64), jnp.bfloat16))
    assert list(chosen) == ["grouped_linear"]


def test_ties_go_to_the_smaller_expert():
    assert routed([1.0, 2.0, 1.0, 1.0]).experts[0].tolist() == [0, 1]
    assert routed([0.5, 0.5, 0.5, 0.5]).experts[0].tolist() == [0, 1]


def test_bias_selects_and_does_not_weigh():
    plain = routed([1.0, 0.5, 0.0, -1.0])
    biased = routed([1.0, 0.5, 0.0, -1.0], bias=(0, 0, 0, 9))
    assert plain.experts[0].tolist() == [0, 1] and biased.experts[0].tolist() == [0, 3]
    scores = np.sqrt(np.log1p(np.exp([1.0, -1.0])))
    assert np.allclose(biased.weights[0], 1.5 * scores / scores.sum(), rtol=1e-6)


def test_image_rows_use_their_own_bias():
    arguments = {"bias": (9, 9, 0, 0), "bias_vl": (0, 0, 9, 9)}
    assert routed([0.0] * 4, **arguments).experts[0].tolist() == [0, 1]
    assert routed([0.0] * 4, image=~NO_IMAGE, **arguments).experts[0].tolist() == [2, 3]


def test_router_temperature_divides_the_logits():
    hot = routed([2.0, 1.0, -40, -40], gate_temp=2.0)
    assert np.allclose(hot.weights, routed([1.0, 0.5, -40, -40]).weights)


@pytest.mark.parametrize("kernels", ["xla", "pallas"])
def test_a_layer_gives_the_same_rows_for_either_order_of_its_experts(kernels):
    """The rows are made in the order in which the first product reads them."""
    found = {}
    for form in ("stored", "arranged"):
        loaded = model("five-layer", dtype="bfloat16", quantized=True, form=form)
        weights = layer_weights(loaded.params, loaded.setup.config, 1)
        text, precision = loaded.setup.config.text, loaded.setup.precision
        random = np.random.default_rng(0)
        streams = jnp.asarray(random.normal(size=(5, text.hc_mult, text.hidden_size)), jnp.bfloat16)
        pre_mix = jnp.asarray(random.random((5, text.hc_mult)), jnp.float32)
        codes = codes_read(weights.moe)
        assert codes == {"stored": "released"}.get(form, form)
        rows = sublayer_input(streams, pre_mix, weights.ffn_norm, text, precision, kernels, codes=codes)
        valid = jnp.arange(5) < 4
        options = {"text": text, "precision": precision, "kernels": kernels}
        hidden = shared_hidden(rows, weights.moe.shared, **options)
        found[form], _ = moe(rows, hidden, weights.moe, jnp.zeros(5, bool), valid, **options)
    stored, arranged = (np.asarray(found[form], np.float32) for form in ("stored", "arranged"))
    # Sums in another order: a hidden value may be rounded to the other side.
    error = np.linalg.norm(arranged - stored, axis=1)
    assert (error <= (2.0**-7 if kernels == "pallas" else 0) * np.linalg.norm(stored, axis=1)).all()


def test_dequantized_experts_read_no_codes():
    loaded = model("five-layer")
    assert codes_read(layer_weights(loaded.params, loaded.setup.config, 1).moe) is None
