"""What the tests of several examples need: a small checkpoint, and dense attention over one sequence at a time."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tree_of_thoughts
from checkpoints import write_checkpoint
from flax import nnx

from codec_jax import Window
from codec_jax.nnx import Decoder, DecoderConfig, Sampler, open_checkpoint


class Dense:
    """A decoder that looks at one sequence at a time, without pages, plans or forests."""

    def __init__(self, model: Decoder, max_context: int) -> None:
        graph, weights = nnx.split(model)
        self._forward = jax.jit(lambda tokens: jax.nn.log_softmax(nnx.merge(graph, weights)(tokens[None])[0]))
        self._max_context = max_context

    def logprobs(self, tokens: list[int]) -> np.ndarray:
        """Of what follows each token, [tokens, V]."""
        padded = np.pad(tokens, (0, self._max_context - len(tokens))).astype(np.int32)
        return np.asarray(self._forward(padded))[: len(tokens)]  # of JAX's array, each length would be a program

    def greedy(self, prompt: list[int], most: int, stop: int) -> list[int]:
        """The most likely tokens, one after another."""
        context = list(prompt)
        while len(context) < len(prompt) + most and (len(context) == len(prompt) or context[-1] != stop):
            context.append(int(self.logprobs(context)[-1].argmax()))
        return context[len(prompt) :]


class SmallModel:
    """A checkpoint of one layer whose tokens are the words w0 to w39, of which w5 ends a text."""

    vocab_size, stop, max_context = 40, 5, 256

    def __init__(self, directory: Path) -> None:
        sizes = {"vocab_size": self.vocab_size, "stop": self.stop, "max_context": self.max_context}
        write_checkpoint(directory, "llama", **sizes, deviation=2.0, seed=4)
        self.directory = directory
        self.checkpoint = open_checkpoint(directory)
        self.decoder = self.checkpoint.load("float32")
        self._dense = Dense(self.decoder, self.max_context)

    def logprobs(self, tokens: list[int]) -> np.ndarray:
        return self._dense.logprobs(tokens)

    def greedy(self, prompt: list[int], most: int) -> list[int]:
        return self._dense.greedy(prompt, most, self.stop)


class WindowedModel(SmallModel):
    """Three layers with random weights that see differently far, for the same tokens."""

    def __init__(self) -> None:
        windows = Window(9), None, Window(16, chunked=True)
        dtypes = {"dtype": jnp.float32, "param_dtype": jnp.float32}
        config = DecoderConfig(self.vocab_size, 32, 48, 3, 4, 2, 16, windows=windows, **dtypes)
        graph, weights = nnx.split(Decoder(config, nnx.Rngs(3)))
        # Texts hardly repeat if attention is sharp.
        self.decoder = nnx.merge(graph, jax.tree.map(lambda x: 2 * x if x.ndim > 1 else x, weights))
        self._dense = Dense(self.decoder, self.max_context)


@pytest.fixture(scope="session")
def game_sampler() -> Sampler:
    """A sampler of the decoder that plays Game of 24, compiled once: 2 puzzles with 20 states of each."""
    sampler = tree_of_thoughts.new_sampler(2, 5, 4)
    sampler._new_engine = partial(sampler._new_engine, prefill_tokens=128)  # one size of chunks, so one program less
    return sampler


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    return SmallModel(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def windowed() -> WindowedModel:
    return WindowedModel()
