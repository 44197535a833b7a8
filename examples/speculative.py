"""Speculative decoding with draft trees: several tokens from one pass of the model, and the same tokens as without.

    python examples/speculative.py                     # 20 puzzles of Game of 24; half a minute
    python examples/speculative.py --temperature 0.5

In each pass, every request brings a tree of candidates for its next tokens. The root is the request's newest token,
which the model has not seen yet, and below it stand guesses of what follows. One pass verifies the trees of all
requests, and one path of each is kept (`verification.py`). The guesses are those of the rules: which move the model
will choose is open, but once it has written 10 + 2 = the rest of the step is arithmetic. Any other source of guesses,
such as a smaller model, takes the place of `by_the_rules`.

A pass costs a GPU little more than a step; a CPU computes every candidate, so no times are shown.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import game24
import numpy as np
from options import command, number
from tqdm import tqdm

if TYPE_CHECKING:
    from verification import Drafts

    from codec_jax import Plan
    from codec_jax.nnx import Decoder, Sampler

Guess = Callable[[list[int]], Counter[int]]  # text so far -> how likely tokens are to follow it

PAGE_SIZE = 16
MAX_TOKENS = 72  # more than any game takes
WIDTHS = (2, 1, 1, 1, 1, 1, 1, 1)  # guesses below each candidate, level by level


def by_the_rules(text: list[int]) -> Counter[int]:
    """Guess how a game goes on: all correct steps are equally likely."""
    end = text.index(game24.END_OF_PROMPT)
    puzzle = tuple(int(game24.VOCABULARY[token]) for token in text[1:end])
    return game24.next_tokens(puzzle, text[end + 1 :])


def draw(weights: Sequence[int], count: int, rng: np.random.Generator | None) -> list[int]:
    """Draw up to `count` indices of positive weights without replacement; the most probable ones without `rng`."""
    # As the largest of independent Gumbel numbers.
    noise = 0.0 if rng is None else rng.gumbel(size=len(weights))
    return np.argsort(-(np.log(weights) + noise), kind="stable")[:count].tolist()


def grow(
    drafts: Drafts, request: int, text: list[int], guess: Guess, widths: Sequence[int], rng: np.random.Generator | None
) -> int:
    """Draw the tree of one request below the last token of its text; return the number of guesses."""
    drafts.tokens[request, 0] = text[-1]
    used, level = 1, [(0, text)]
    for width in widths:
        above, level = level, []
        for candidate, path in above:
            likely = (+guess(path)).most_common(drafts.ids.shape[2])  # a token of weight 0 is no guess
            if not likely:
                continue
            ids, weights = zip(*likely, strict=True)
            drafts.ids[request, candidate, : len(ids)] = ids
            drafts.probability[request, candidate, : len(ids)] = np.divide(weights, sum(weights))
            for i in draw(weights, width, rng):
                drafts.parent[request, used], drafts.tokens[request, used] = candidate, ids[i]
                level.append((used, [*path, ids[i]]))
                used += 1
    return used - 1


def tree_size(widths: Sequence[int]) -> int:
    """Count the candidates of a tree, its root included."""
    return 1 + sum(itertools.accumulate(widths, int.__mul__))


@dataclass
class Answers:
    """What the requests said, and what it took."""

    tokens: list[list[int]]
    guessed: list[list[bool]]  # whether each token is a guess that was kept
    passes: int = 0
    trees: int = 0  # verified: one for each request and pass
    guesses: int = 0


def speculate(
    model: Decoder,
    sampler: Sampler,
    prompts: Sequence[list[int]],
    guess: Guess,
    *,
    max_new_tokens: int,
    stop_tokens: Sequence[int] = (),
    temperature: float = 0.0,
    widths: Sequence[int] = WIDTHS,
    seed: int = 0,
) -> Answers:
    """Continue prompts up to a stop token or max_new_tokens, with a sampler of the model for them all."""
    import jax
    from flax import nnx
    from verification import Drafts, verify

    from codec_jax import checks, make_plan, replan
    from codec_jax.nnx.params import SamplingParams
    from codec_jax.nnx.sampling import RowOptions, draw

    checks.integer("max_new_tokens", max_new_tokens)
    size, depth, batch, config = tree_size(widths), len(widths) + 1, sampler.max_requests, model.config
    heads = {name: getattr(config, name) for name in ("num_q_heads", "num_kv_heads", "head_dim")}
    heads |= {"kv_dtype": config.cache_dtype}
    graph, weights = nnx.split(model)
    run = jax.jit(lambda weights, *rest: verify(nnx.merge(graph, weights), depth, *rest), donate_argnums=1)
    state = sampler.start(prompts, progress=True)
    plans: tuple[Plan, ...] = ()  # for each of the model's windows
    forest, pool, cache = state.forest, state.pool, state.cache
    key, rng = jax.random.key(seed), np.random.default_rng(seed) if temperature > 0 else None
    # The first token of each request is the model's own, as every pass brings another one.
    # It has streams of its own, apart from those of `verify`.
    rows = [SamplingParams(temperature=temperature, seed=seed, stream=batch + row) for row in range(batch)]
    first = draw(state.logits, RowOptions.of(rows, config.vocab_size), None, forest.request_length).token
    answers = Answers([[token] for token in first[: len(prompts)].tolist()], [[False] for _ in prompts])
    with tqdm(total=len(prompts), desc="decode", unit="answer") as bar:
        while True:
            requests, done = [], []
            for request in np.flatnonzero(forest.active).tolist():
                said = answers.tokens[request]
                ends = said[-1] in stop_tokens or len(said) >= max_new_tokens
                (done if ends else requests).append(request)
            forest, pool = forest.retire(pool, done)
            bar.update(len(done))
            if not requests:
                return answers
            forest, pool = forest.reserve(pool, size)
            grown = forest.extend(size)
            plans = tuple(replan(plan, grown) for plan in plans) or tuple(
                make_plan(grown, **heads, query_tokens=size, window=window) for window in config.windows_used
            )
            drafts = Drafts.empty(batch, size)
            for request in requests:
                text = prompts[request] + answers.tokens[request]
                answers.guesses += grow(drafts, request, text, guess, widths, rng)
            cache, *results = run(weights, cache, forest, plans, drafts, key, np.float32(temperature))
            path, count, following = jax.device_get(results)
            forest = forest.extend(count)
            answers.passes, answers.trees = answers.passes + 1, answers.trees + len(requests)
            for request in requests:
                kept = path[request, 1 : count[request]].tolist()
                new = [*kept, int(following[request])][: max_new_tokens - len(answers.tokens[request])]
                end = next((i + 1 for i, token in enumerate(new) if token in stop_tokens), len(new))
                answers.tokens[request] += new[:end]
                answers.guessed[request] += [i < len(kept) for i in range(end)]


def marked(tokens: Sequence[int], guessed: Sequence[bool]) -> str:
    """Write a game with the guesses in brackets."""
    parts = itertools.groupby(zip(tokens, guessed, strict=True), key=lambda pair: pair[1])
    texts = ((kept, game24.text(token for token, _ in pairs)) for kept, pairs in parts)
    return " ".join(f"[{text}]" if kept else text for kept, text in texts)


def main(argv: Sequence[str] | None = None) -> None:
    """Decode with draft trees, then token by token, and report on both."""
    parser = command(__doc__, temperature=0.0)
    parser.add_argument("--puzzles", type=number(int, 1, game24.HELD_OUT), default=20, help="held-out, up to 100")
    arguments = parser.parse_args(argv)
    print("speculative: decodes with verified guesses, then token by token, and compares", flush=True)
    import game24_model

    from codec_jax.nnx import Sampler

    puzzles = game24.split()[1][: arguments.puzzles]
    prompts = [game24.encode_prompt(puzzle) for puzzle in puzzles]
    try:
        model = game24_model.load()
    except (OSError, ValueError) as error:
        sys.exit(f"speculative: {error}")
    pages = len(prompts) * (3 + (MAX_TOKENS + tree_size(WIDTHS)) // PAGE_SIZE)
    sampler = Sampler(model, max_requests=len(prompts), num_pages=pages, page_size=PAGE_SIZE)
    sampling = {"temperature": arguments.temperature, "seed": arguments.seed, "stop_tokens": [game24.DONE]}
    answers = speculate(model, sampler, prompts, by_the_rules, max_new_tokens=MAX_TOKENS, **sampling)
    completions = sampler.generate(prompts, max_new_tokens=MAX_TOKENS, progress=True, **sampling)
    plain = [completion.tokens for completion in completions]

    for puzzle, tokens, guessed in zip(puzzles, answers.tokens, answers.guessed, strict=True):
        print(f"{' '.join(map(str, puzzle)):>12} : {marked(tokens, guessed)}")
    tokens, kept = sum(map(len, answers.tokens)), sum(map(sum, answers.guessed))
    of_passes = tokens - len(prompts)  # the first token of each answer is the prompt's
    print(
        f"\ndraft trees      {tokens:,} tokens in {answers.passes} passes: {of_passes / max(answers.trees, 1):.2f} "
        f"tokens per request and pass"
        f"\n                 {kept:,} of {answers.guesses:,} guesses kept ({kept / max(answers.guesses, 1):.0%}), "
        f"those in brackets; {tree_size(WIDTHS)} candidates in a tree"
        f"\ntoken by token   {sum(map(len, plain)):,} tokens in {max(map(len, plain))} steps"
    )
    if arguments.temperature == 0:
        same = sum(a == b for a, b in zip(answers.tokens, plain, strict=True))
        print(f"same answers     {same} of {len(plain)}, in every token")


if __name__ == "__main__":
    main()
