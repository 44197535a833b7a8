"""Decode the same prompts at temperature 0 in batches of different composition, and compare what comes out.

    python -m benchmarks.invariance --json benchmarks/results/invariance.json

A request reads the same K and V whoever is beside it, but a plan of the policy "aligned" cuts them differently, so sums
are rounded in another order. A sampler of the policy "invariant" keeps the order, and the shapes of products. Rows say
how many tokens agree before the first that differs, how far logits and log-probabilities are apart up to there, and of
which prompts every bit of them is the same. Weights are random: their best tokens are closer to each other than those
of a trained model.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from tqdm import tqdm

from benchmarks.decode_step import layout_of
from benchmarks.rows import attempt, collect, conditions, publish
from benchmarks.timing import command, parse
from codec_jax.nnx import PUBLISHED, Decoder, DecoderConfig, Sampler, random_decoder

MODELS = {
    "small": DecoderConfig(4096, 256, 512, num_layers=4, num_q_heads=8, num_kv_heads=2, head_dim=64),
    "qwen3-0.6b": PUBLISHED["qwen3-0.6b"],
}

#: Two documents, each long enough to be split, with four questions each.
DOCUMENTS, QUESTIONS = (3300, 3500), (5, 12, 31, 64)
TOKENS = 64
POLICIES = ["aligned", "invariant"]

#: Batches by the numbers of their prompts; all prompts are in one batch of every composition.
COMPOSITIONS = {
    "alone": [[prompt] for prompt in range(8)],
    "those of its document": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "one of each document": [[0, 4], [1, 5], [2, 6], [3, 7]],
    "all": [[0, 1, 2, 3, 4, 5, 6, 7]],
    "all, in another order": [[6, 1, 3, 4, 0, 7, 5, 2]],
}


class Text(NamedTuple):
    """The completion of a prompt."""

    first_logits: Float[np.ndarray, " V"]
    tokens: list[int]
    logprobs: list[float]


def main() -> None:
    """Decode, compare, and write the rows."""
    parser = command(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--implementations", nargs="+", choices=["mosaic", "xla"], default=["mosaic", "xla"])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    arguments = parse(parser)
    rows = collect(measure_all(arguments.models, arguments.implementations, arguments.policies), arguments.json)
    publish(arguments.json, rows, [f"{row['model']}, {row['implementation']}" for row in rows if "error" in row])


def measure_all(models: list[str], implementations: list[str], policies: list[str]) -> Iterator[dict]:
    """Yield a row for each composition of every model, path and policy; where one fails, a row says why."""
    for name, implementation, policy in tqdm(list(product(models, implementations, policies))):
        config = MODELS[name]
        common = {"model": name, "implementation": implementation, "policy": policy} | conditions(layout_of(config))
        prompts = make_prompts(config.vocab_size, DOCUMENTS, QUESTIONS)
        compare = partial(compositions, random_decoder(config), prompts, TOKENS, implementation, policy)
        new = attempt(lambda compare=compare: {"rows": compare()}, "rows", "error")
        for row in new["rows"] or [{"composition": None, "error": new["error"]}]:
            yield row | common


def make_prompts(vocab_size: int, documents: tuple[int, ...], questions: tuple[int, ...]) -> list[list[int]]:
    """Draw the documents and questions; the prompts of a document follow each other."""
    rng = np.random.default_rng(0)
    drawn = [rng.integers(0, vocab_size, size).tolist() for size in documents]
    return [document + rng.integers(0, vocab_size, size).tolist() for document in drawn for size in questions]


def compositions(model: Decoder, prompts: list[list[int]], tokens: int, implementation: str, policy: str) -> list[dict]:
    """Decode every composition, and each prompt in a sampler for one request; compare all with those alone."""
    longest = max(map(len, prompts)) + tokens
    make = partial(
        Sampler,
        model,
        num_pages=len(prompts) * -(-longest // 16),
        max_context=longest,
        implementation=implementation,
        invariant=policy == "invariant",
    )
    sampler = make(max_requests=len(prompts))
    texts = {name: decode(sampler, prompts, batches, tokens) for name, batches in COMPOSITIONS.items()}
    texts["alone, room for one request"] = decode(make(max_requests=1), prompts, COMPOSITIONS["alone"], tokens)
    reference = texts.pop("alone")
    return [{"composition": name, "tokens": tokens} | differences(reference, text) for name, text in texts.items()]


def decode(sampler: Sampler, prompts: list[list[int]], batches: list[list[int]], tokens: int) -> list[Text]:
    """Complete the prompts in the given batches at temperature 0; returns what became of each prompt."""
    texts: dict[int, Text] = {}
    for batch in batches:
        state = sampler.start([prompts[prompt] for prompt in batch])
        logits = np.asarray(state.logits)
        _, new = sampler.decode(state, tokens, temperature=0.0)
        for request, prompt in enumerate(batch):
            texts[prompt] = Text(logits[request], new.tokens[request], new.logprobs[request])
    return [texts[prompt] for prompt in range(len(prompts))]


def differences(reference: list[Text], texts: list[Text]) -> dict:
    """Count the tokens of each prompt that agree, and find the largest differences up to there.

    The difference of logits is that of the first token, relative by the norm over the vocabulary.
    """
    agree, logprobs, logits, same_bits = [], [0.0], [], []
    for one, other in zip(reference, texts, strict=True):
        same = np.asarray(one.tokens) == np.asarray(other.tokens)
        agree.append(len(same) if same.all() else int(np.argmin(same)))
        apart = np.abs(np.subtract(one.logprobs, other.logprobs))[: agree[-1]]
        logprobs.append(float(apart.max(initial=0.0)))
        distance = np.linalg.norm(one.first_logits - other.first_logits)
        logits.append(float(distance / np.linalg.norm(one.first_logits)))
        same_logits = np.array_equal(one.first_logits, other.first_logits)
        same_bits.append(bool(same.all()) and one.logprobs == other.logprobs and same_logits)
    return {
        "tokens_before_the_first_difference": agree,
        "logprob_difference": max(logprobs),
        "logits_difference": max(logits),
        "same_bits": same_bits,
    }


if __name__ == "__main__":
    main()
