"""Load that is offered to an engine: which prompts come when, and how many tokens each is to generate."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

TRACE = Path(__file__).parent / "data" / "mooncake_conversation_2000.jsonl"
BLOCK_TOKENS = 512  # of a Mooncake trace


class Offered(NamedTuple):
    """A request to come. It generates `new_tokens` tokens, whatever they are."""

    at: float  # seconds after the beginning
    prompt: Int[np.ndarray, " tokens"]
    new_tokens: int
    stream: int = 0  # of the random numbers that it draws by


def trace(path: Path, requests: int, speed: float, vocab_size: int) -> list[Offered]:
    """Return the first requests of a trace in Mooncake's format, in the order in which they arrive.

    A block's id draws its tokens, so equal ids are equal tokens. Arrivals come `speed` times as fast as they did, and
    all at once if that is infinite.
    """

    @cache
    def block(block_id: int) -> Int[np.ndarray, " tokens"]:
        return _random([0, block_id], BLOCK_TOKENS, vocab_size)

    offered = []
    for line in itertools.islice(path.open(), requests):
        row = json.loads(line)
        prompt = np.concatenate([block(block_id) for block_id in row["hash_ids"]])[: row["input_length"]]
        if len(prompt) != row["input_length"]:
            raise ValueError(
                f"{path}: expected a block for each {BLOCK_TOKENS} of {row['input_length']} tokens, "
                f"got {len(row['hash_ids'])}"
            )
        offered.append(Offered(row["timestamp"] / 1e3 / speed, prompt, row["output_length"]))
    return sorted(offered, key=lambda each: each.at)


def rollouts(prompts: int, samples: int, prompt_tokens: int, new_tokens: int, vocab_size: int) -> list[Offered]:
    """Return several samples of each of some prompts that share nothing, prompt by prompt, all at once."""
    drawn = [_random([1, prompt], prompt_tokens, vocab_size) for prompt in range(prompts)]
    return [Offered(0.0, prompt, new_tokens, stream) for prompt in drawn for stream in range(samples)]


def questions(
    questions: int, documents: int, document_tokens: int, question_tokens: int, new_tokens: int, vocab_size: int
) -> list[Offered]:
    """Return questions that follow one of a few documents each, in turn, all at once."""
    drawn = [_random([2, document], document_tokens, vocab_size) for document in range(documents)]
    own = [_random([3, question], question_tokens, vocab_size) for question in range(questions)]
    prompts = [np.concatenate([drawn[i % documents], own[i]]) for i in range(questions)]
    return [Offered(0.0, prompt, new_tokens) for prompt in prompts]


def throughput(offered: Sequence[Offered], generated: int, seconds: float) -> dict:
    """Return what a row says of a load that took so long."""
    prompt_tokens = sum(len(each.prompt) for each in offered)
    return {
        "requests": len(offered),
        "prompt_tokens": prompt_tokens,
        "generated_tokens": generated,
        "seconds": seconds,
        "output_tokens_per_second": generated / seconds,
        "total_tokens_per_second": (prompt_tokens + generated) / seconds,
    }


def percentiles(name: str, seconds: Float[np.ndarray, " each"]) -> dict[str, float | None]:
    """Return median and 99th percentile; None where nothing was measured."""
    median, most = np.percentile(seconds, [50, 99]).tolist() if seconds.size else (None, None)
    return {f"{name}_median_seconds": median, f"{name}_p99_seconds": most}


def _random(seed: list[int], tokens: int, vocab_size: int) -> Int[np.ndarray, " tokens"]:
    return np.random.default_rng(seed).integers(0, vocab_size, tokens, np.int32)
