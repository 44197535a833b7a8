"""Prompts go to an engine, and completions come back, each told of as it goes on; `Sampler.generate` is this."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Int
from tqdm import tqdm

from codec_jax.nnx.engine import Engine
from codec_jax.nnx.params import SamplingParams
from codec_jax.nnx.state import Completion


def complete(
    engine: Engine,
    prompts: Sequence[Int[np.ndarray, " tokens"]],
    streams: Int[np.ndarray, " completions"],
    params: SamplingParams,
    *,
    on_tokens: Callable[[int, list[int]], None] | None,
    on_completion: Callable[[int, Completion], None] | None,
    progress: bool,
) -> list[Completion]:
    """Complete every prompt as often as there are streams for it; after an error, the engine is not to be used again.

    Args:
      engine: one that has nothing else to do.
      prompts: token ids.
      streams: the random stream of each completion, prompt by prompt.
      params: of all of them, except for the stream.
      on_tokens: called with the index of a completion and its new tokens.
      on_completion: called with the index and the completion.
      progress: show a bar.

    Raises ValueError for prompts that can never fit, before anything runs, and what the callbacks raise.
    """
    samples = len(streams) // len(prompts)
    indices = {
        engine.submit(prompts[i // samples], replace(params, stream=stream)): i
        for i, stream in enumerate(streams.tolist())
    }
    done: dict[int, Completion] = {}
    told = [0] * len(streams)  # tokens of each completion
    with tqdm(total=len(streams) * params.max_tokens, unit="token", leave=None, disable=not progress) as bar:
        while len(done) < len(streams):
            for request in engine.step():
                i, reason = indices[request], request.finish_reason
                before, told[i] = told[i], len(request.tokens)
                bar.update((told[i] if reason is None else params.max_tokens) - before)
                if on_tokens is not None and told[i] > before:
                    on_tokens(i, request.tokens[before:])
                if reason is not None:
                    done[i] = Completion(i // samples, request.tokens, request.logprobs, reason)
                    if on_completion is not None:
                        on_completion(i, done[i])
    return [done[i] for i in range(len(streams))]
