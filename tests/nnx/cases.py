"""What the sampler's tests decode, and dense attention over each request alone to compare with."""

from functools import cache, partial
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from codec_jax.nnx import Decoder, DecoderConfig, Decoding, Sampler, intervals
from codec_jax.nnx.prefill import MAX_CHUNK_TOKENS
from codec_jax.planning import planner
from pallas_kernels import Tiling

VOCAB, CONTEXT = 48, 160
REQUESTS, PAGES, PAGE_SIZE, STEPS = 8, 64, 8, 7

RNG = np.random.default_rng(0)
DOCUMENT, SECTION = RNG.integers(0, VOCAB, 37).tolist(), RNG.integers(0, VOCAB, 12).tolist()
QUESTIONS = [RNG.integers(0, VOCAB, size).tolist() for size in (5, 3, 9)]
# Two requests share document and section, one the document alone; one is on its own; they part inside pages.
PROMPTS = [
    [*DOCUMENT, *SECTION, *QUESTIONS[0]],
    QUESTIONS[1],
    [*DOCUMENT, *SECTION, *QUESTIONS[2]],
    [*DOCUMENT, *QUESTIONS[2]],
]
LONG = RNG.integers(0, VOCAB, 150).tolist()
# Seven prompts that hardly share anything, and whose greedy texts do not fit the pool together.
CROWD = [LONG[15 * r : 15 * r + 45] for r in range(7)]


def sharp(config: DecoderConfig) -> Decoder:
    """Return a decoder whose weights make for sharp attention and texts that do not repeat."""
    graph, weights = nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    weights = jax.tree.map(
        lambda x: jnp.asarray(1.0 + (x.ndim > 1) * (rng.normal(size=x.shape) * 2 * x.shape[0] ** -0.5 - 1.0), x.dtype),
        weights,
    )
    return nnx.merge(graph, weights)


def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan as GPUs do for larger forests; what is compiled under these tiles has to run under them."""
    tiling = Tiling(num_ctas=5, tile_rows=8, lanes=2, block_tokens=(32, 32))
    for module in (planner, intervals):
        monkeypatch.setattr(module, "default_tiling", lambda heads: tiling)
    monkeypatch.setattr(planner, "MIN_WIDE_TOKENS", PAGE_SIZE)


def new_sampler(model: Decoder) -> Sampler:
    """Return a sampler of the sizes of these tests; its engine has one size of chunks, so one program less."""
    sizes = {"max_requests": REQUESTS, "num_pages": PAGES, "page_size": PAGE_SIZE, "max_context": CONTEXT}
    sampler = Sampler(model, **sizes, steps=STEPS)
    sampler._new_engine = partial(sampler._new_engine, prefill_tokens=MAX_CHUNK_TOKENS)
    return sampler


class Dense:
    """The model over one sequence at a time, padded to one length."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        graph, weights = nnx.split(model)
        forward = jax.jit(lambda weights, tokens: nnx.merge(graph, weights)(tokens))

        def all_logits(context: tuple[int, ...]) -> np.ndarray:
            padded = np.zeros((1, CONTEXT), np.int32)
            padded[0, : len(context)] = context
            # Parts are taken of NumPy's array: of JAX's, each length would be a program.
            return np.asarray(forward(weights, padded))[0, : len(context)]

        self.all_logits = cache(all_logits)

    def logits(self, context: list[int]) -> np.ndarray:
        """Logits of the token that follows."""
        return self.all_logits(tuple(context))[-1]

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        context = list(prompt)
        for _ in range(count):
            context.append(int(self.logits(context).argmax()))
        return context[len(prompt) :]

    def logprobs(self, prompt: list[int], tokens: list[int]) -> np.ndarray:
        """Log-probability of each token after those before it, at temperature 1."""
        logits = self.all_logits((*prompt, *tokens))[len(prompt) - 1 : -1].astype(np.float64)
        shifted = logits - logits.max(-1, keepdims=True)
        return (shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))[np.arange(len(tokens)), tokens]


class Setup(NamedTuple):
    sampler: Sampler
    dense: Dense


def assert_logits_follow(state: Decoding, contexts: dict[int, list[int]], dense: Dense) -> None:
    assert state.requests == sorted(contexts)
    for request, context in contexts.items():
        chex.assert_trees_all_close(np.asarray(state.logits[request]), dense.logits(context), atol=1e-4, rtol=1e-4)


def numbered(prompts: list[list[int]]) -> dict[int, list[int]]:
    return {request: list(prompt) for request, prompt in enumerate(prompts)}


def until_stop(tokens: list[int], stops: list[int]) -> list[int]:
    ends = [i for i, token in enumerate(tokens) if token in stops]
    return tokens[: ends[0] + 1] if ends else tokens


def stops_for(texts: list[list[int]]) -> list[int]:
    """A token that ends the first text at its tenth token or later and does not occur in some other one."""
    for token in texts[0][9:]:
        if token not in texts[0][:9] and any(token not in text for text in texts[1:]):
            return [token, VOCAB - 1 if token else VOCAB - 2]
    raise AssertionError("no token stops the first text only; choose other weights")
