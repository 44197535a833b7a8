"""A sampler keeps the weights it has until it is given others: a policy that is trained while it is sampled from."""

from dataclasses import replace

import jax
import pytest
from cases import PROMPTS, Dense, new_sampler
from flax import nnx

from codec_jax.nnx import Decoder, Sampler

TOKENS = 7


@pytest.fixture
def model(dense: Dense) -> Decoder:
    return nnx.clone(dense.model)


def shift(model: Decoder) -> None:
    """Change all weights in place, as an optimizer does."""
    nnx.update(model, jax.tree.map(lambda x: x[..., ::-1] * 1.1, nnx.state(model)))


def texts(sampler: Sampler) -> list[list[int]]:
    return [each.tokens for each in sampler.generate(PROMPTS, max_new_tokens=TOKENS, temperature=0.0)]


def test_training_a_model_does_not_reach_its_sampler_until_update_weights(
    model: Decoder, dense: Dense, compilations: list[str]
) -> None:
    sampler = new_sampler(model)
    before = [dense.greedy(prompt, TOKENS) for prompt in PROMPTS]
    shift(model)
    after = [Dense(nnx.clone(model)).greedy(prompt, TOKENS) for prompt in PROMPTS]
    assert before != after
    assert texts(sampler) == before
    sampler.decode(sampler.start(PROMPTS), TOKENS)
    compilations.clear()
    sampler.update_weights(model)
    assert texts(sampler) == after
    _, steered = sampler.decode(sampler.start(PROMPTS), TOKENS, temperature=0.0)
    assert steered.tokens[: len(PROMPTS)] == after
    assert not compilations
    # The new weights are a snapshot too.
    shift(model)
    assert texts(sampler) == after


def test_weights_of_another_shape_dtype_or_config_are_refused(sampler: Sampler, model: Decoder) -> None:
    others = {
        "config": Decoder(replace(model.config, mlp_size=40), nnx.Rngs(0)),
        "dtype": nnx.clone(model),
        "scaling": Decoder(replace(model.config, rope_theta=5.0), nnx.Rngs(0)),
    }
    nnx.update(others["dtype"], jax.tree.map(lambda x: x.astype("bfloat16"), nnx.state(model)))
    for other in others.values():
        with pytest.raises(ValueError, match=r"model: expected weights of the config, shapes and dtypes"):
            sampler.update_weights(other)
    with pytest.raises(TypeError, match=r"model: expected a Decoder, got dict"):
        sampler.update_weights({})
