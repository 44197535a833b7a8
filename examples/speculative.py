"""Speculative decoding with draft trees: several tokens from one pass over the model, distributed as the model says.

Each pass, every request brings a tree of candidate tokens. The tree's root is the request's newest token, which the
model has not seen yet, and below it stand guesses of an n-gram model that learns from all prompts and answers so far.
One pass verifies the trees of all requests, each candidate seeing the shared prompt, the request's own tokens and the
candidates above it; then one path of each tree is kept.

    draft    tree of guesses for each request ─► parents, tokens, the probabilities they were drawn with
    verify   one pass of the model over prompt (read once for all its samples), answer and tree
    accept   a guess x, drawn from q, where the model has p: keep x with probability min(1, p(x) / q(x)); else go on to
             its next sibling with p <- the positive part of p - q, and q <- q without x, both normalised
    compact  K and V of the path move to the front of the tree's slots, and the rest of the tree is forgotten

So the tokens are distributed exactly as those that the model samples one by one, and at temperature 0 they are the
same, however bad the guesses are. The rule for one guess is that of Leviathan et al. (ICML 2023), for trees that of
SpecInfer (ASPLOS 2024, algorithm 2), and for siblings drawn without replacement that of recursive rejection sampling
(Jeon et al., 2024). What a request says depends on what the n-gram model has read, and so on who is decoded
beside it; its distribution does not.

A pass costs a GPU little more than a step of one token, as long as both are bound by memory. A CPU computes every
candidate, so there it is slower to guess than to decode token by token; what the report says of passes holds anywhere.

    python examples/speculative.py                                     # 20 puzzles of Game of 24, 4 answers each
    python examples/speculative.py --temperature 0 --samples 1         # and compare with decoding token by token
    python examples/speculative.py --model DIR --questions questions.txt
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key
from self_consistency import PAGE_SIZE, Task, add_task_arguments, check_task_arguments, task_of
from tqdm import tqdm

from codec_jax import DraftTrees, Forest, KVPages, Plan, make_plan
from codec_jax.nnx import Decoder, Sampler
from codec_jax.nnx.sampling import request_keys, sample

WIDTHS = (3, 2, 1, 1, 1)  # guesses below each candidate, level by level
SUPPORT = 8  # tokens to which an n-gram model gives any probability
INTERVAL = 32  # tokens between two plans


# --- Draft --------------------------------------------------------------------------------------------------------


class Ngrams:
    """What followed the last few tokens before: the longest context that was seen decides."""

    def __init__(self, order: int = 5) -> None:
        """Remember what follows up to `order` tokens."""
        self._order = order
        self._followers: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)

    def learn(self, tokens: Sequence[int], new: int) -> None:
        """Count the last `new` of the tokens."""
        for end in range(len(tokens) - new, len(tokens)):
            for size in range(min(self._order, end) + 1):
                self._followers[tuple(tokens[end - size : end])][tokens[end]] += 1

    def guess(self, tokens: Sequence[int]) -> tuple[Int[np.ndarray, " some"], Float[np.ndarray, " some"]]:
        """Return up to SUPPORT tokens that may follow, and their probabilities."""
        for size in range(min(self._order, len(tokens)), -1, -1):
            followers = self._followers.get(tuple(tokens[len(tokens) - size :]))
            if followers:
                ids, counts = zip(*followers.most_common(SUPPORT), strict=True)
                return np.asarray(ids), np.asarray(counts) / sum(counts)
        return np.zeros(0, np.int64), np.zeros(0)


def draw(probability: Float[np.ndarray, " some"], count: int, rng: np.random.Generator | None) -> list[int]:
    """Draw up to `count` indices without replacement, in the order of drawing; the most probable ones without `rng`.

    Each is drawn from what the earlier ones have left of the distribution: the largest of independent Gumbel numbers.
    """
    noise = 0.0 if rng is None else rng.gumbel(size=len(probability))
    return np.argsort(-(np.log(probability) + noise), kind="stable")[:count].tolist()


def tree_size(widths: Sequence[int]) -> int:
    """Count the candidates of a tree, its root included."""
    return 1 + sum(math.prod(widths[: depth + 1]) for depth in range(len(widths)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drafts:
    """Trees of T candidates in the order of drawing, and what the children of each were drawn from."""

    parent: Int[np.ndarray, "B T"]  # -1 for the root, which is no guess, and where a tree is smaller
    tokens: Int[np.ndarray, "B T"]
    ids: Int[np.ndarray, "B T support"]
    probability: Float[np.ndarray, "B T support"]  # of `ids`; all 0 for a candidate without children

    @classmethod
    def empty(cls, batch: int, tokens: int) -> Drafts:
        """Return trees without any candidates."""
        drawn = (batch, tokens, SUPPORT)
        parent = np.full((batch, tokens), -1, np.int32)
        return cls(parent, np.zeros_like(parent), np.zeros(drawn, np.int32), np.zeros(drawn, np.float32))

    def grow(
        self, request: int, text: list[int], ngrams: Ngrams, widths: Sequence[int], rng: np.random.Generator | None
    ) -> int:
        """Draw the tree of one request below the last token of its text; return the number of guesses."""
        self.tokens[request, 0] = text[-1]
        used, level = 1, [(0, text)]
        for width in widths:
            above, level = level, []
            for candidate, path in above:
                ids, probability = ngrams.guess(path)
                self.ids[request, candidate, : len(ids)] = ids
                self.probability[request, candidate, : len(ids)] = probability
                for i in draw(probability, width, rng):
                    self.parent[request, used], self.tokens[request, used] = candidate, ids[i]
                    level.append((used, [*path, int(ids[i])]))
                    used += 1
        return used - 1


# --- Accept -------------------------------------------------------------------------------------------------------


def accept(
    key: Key[Array, ""],
    logits: Float[Array, "T V"],
    parent: Int[Array, " T"],
    tokens: Int[Array, " T"],
    ids: Int[Array, "T support"],
    probability: Float[Array, "T support"],
    temperature: Float[Array, ""],
) -> tuple[Bool[Array, " T"], Int[Array, ""]]:
    """Decide which candidates of one tree are kept, the root among them, and draw the token that follows them.

    All are by place, that is in depth-first order: parent and token of each candidate, the model's logits of what
    follows it, and the distribution that its children were drawn from, one after another without replacement. Returns
    which places are kept, a path from the root down, and a token that is no candidate's.
    """
    key_of_tests, key_of_next = jax.random.split(key)
    chance = jax.random.uniform(key_of_tests, tokens.shape)
    vocabulary = logits.shape[-1]
    likeliest = jax.nn.one_hot(jnp.argmax(logits, axis=-1), vocabulary)
    model = jnp.where(temperature == 0.0, likeliest, jax.nn.softmax(logits / jnp.maximum(temperature, 1e-6)))

    def draft(place: Array) -> Array:
        return jnp.zeros(vocabulary).at[ids[place]].add(probability[place])

    def test(carry: tuple, place: Array) -> tuple:
        """Test the candidate if it is a child of the last one that was kept; its earlier siblings were not."""
        last, p, q = carry
        token = tokens[place]
        tested = parent[place] == last
        kept = tested & (chance[place] * q[token] < p[token])
        others, left = jnp.maximum(p - q, 0.0), q.at[token].set(0.0)
        refused_p = jnp.where(others.sum() > 0, others / jnp.maximum(others.sum(), 1e-30), p)
        refused_q = left / jnp.maximum(left.sum(), 1e-30)
        p = jnp.where(kept, model[place], jnp.where(tested, refused_p, p))
        q = jnp.where(kept, draft(place), jnp.where(tested, refused_q, q))
        return (jnp.where(kept, place, last), p, q), kept

    root = jnp.int32(0)
    places = jnp.arange(1, tokens.shape[0], dtype=jnp.int32)
    (_, p, _), kept = lax.scan(test, (root, model[root], draft(root)), places)
    following = jax.random.categorical(key_of_next, jnp.log(p)).astype(jnp.int32)
    return jnp.concatenate([jnp.ones(1, bool), kept]), following


# --- Verify -------------------------------------------------------------------------------------------------------


def verify(
    model: Decoder,
    depth: int,
    cache: tuple[KVPages, ...],
    forest: Forest,
    plan: Plan,
    drafts: Drafts,
    key: Key[Array, ""],
    temperature: Float[Array, ""],
) -> tuple[tuple[KVPages, ...], Int[Array, "B A"], Int[Array, " B"], Int[Array, " B"]]:
    """Run one pass: return the cache, the tokens kept in each tree of `depth` levels, their count, and the next one."""
    trees = DraftTrees.from_parents(drafts.parent)
    tokens, ids, probability = (trees.sort(x) for x in (drafts.tokens, drafts.ids, drafts.probability))
    hidden, cache = model.decode(tokens, cache, forest.extend(tokens.shape[1]), plan, drafts=trees)
    keys = request_keys(key, jnp.arange(tokens.shape[0], dtype=jnp.int32), forest.request_length)
    kept, following = jax.vmap(partial(accept, temperature=temperature))(
        keys, model.logits(hidden), trees.parent, tokens, ids, probability
    )
    kept &= forest.active[:, None]
    path = jnp.argsort(~kept, axis=1)[:, :depth].astype(jnp.int32)  # the places that are kept, in order, then others
    count = kept.sum(axis=1, dtype=jnp.int32)
    _, source, target = trees.accept(forest, path, count)
    cache = tuple(pages.move(source, target) for pages in cache)
    return cache, jnp.take_along_axis(tokens, path, axis=1), count, following


@dataclass(frozen=True)
class Answers:
    """Tokens of each request, and what they took."""

    tokens: list[list[int]]
    trees: int  # verified: one for each request and pass
    passes: int
    guesses: int
    kept: int
    seconds: float  # of drafting, verifying and planning; the first pass, which compiles, left out


def speculate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_tokens: Sequence[int] = (),
    temperature: float = 1.0,
    widths: Sequence[int] = WIDTHS,
    seed: int = 0,
) -> Answers:
    """Continue every prompt up to a stop token or max_new_tokens."""
    size, depth, batch = tree_size(widths), len(widths) + 1, len(prompts)
    pages = len(Forest.from_sequences(prompts, page_size=PAGE_SIZE).used_pages)
    pages += batch * (2 + (max_new_tokens + size + depth + INTERVAL) // PAGE_SIZE)
    state = Sampler(model, max_requests=batch, num_pages=pages, page_size=PAGE_SIZE).start(prompts, progress=True)
    forest, pool, cache = state.forest, state.pool, state.cache
    graph, weights = nnx.split(model)
    run = jax.jit(
        lambda weights, *rest: verify(nnx.merge(graph, weights), depth, *rest),
        donate_argnums=1,
    )
    config = model.config
    key, rng = jax.random.key(seed), np.random.default_rng(seed) if temperature > 0 else None
    # The first token of each request is the model's own, as every pass brings another one.
    keys = request_keys(jax.random.fold_in(key, 1), np.arange(batch, dtype=np.int32), forest.request_length)
    limits = np.float32(temperature), np.int32(config.vocab_size), np.float32(1.0)
    texts = [
        [*prompt, int(first)] for prompt, first in zip(prompts, sample(state.logits, keys, *limits)[0], strict=True)
    ]
    ngrams = Ngrams()
    for text in texts:
        ngrams.learn(text, len(text))

    def finished(request: int) -> bool:
        new = len(texts[request]) - len(prompts[request])
        return texts[request][-1] in stop_tokens or new >= max_new_tokens

    trees = passes = guesses = kept = 0
    plan, planned, blocks = None, forest.length, 0
    began = time.perf_counter()
    with tqdm(total=batch, desc="decode", unit="answer") as bar:
        while True:
            gone = [request for request in np.flatnonzero(forest.active).tolist() if finished(request)]
            if gone:
                forest, pool = forest.retire(pool, gone)
                plan = None
                bar.update(len(gone))
            requests = np.flatnonzero(forest.active).tolist()
            if not requests:
                break
            if plan is None or (forest.length - planned).max() > INTERVAL:
                forest, pool = forest.reserve(pool, size + INTERVAL)
                planned = forest.length
                plan = make_plan(
                    forest.extend(size),
                    num_q_heads=config.num_q_heads,
                    num_kv_heads=config.num_kv_heads,
                    head_dim=config.head_dim,
                    query_tokens=size,
                    steps=INTERVAL,
                    block_capacity=blocks,
                )
                blocks = plan.pages.shape[0]
            drafts = Drafts.empty(batch, size)
            for request in requests:
                guesses += drafts.grow(request, texts[request], ngrams, widths, rng)
            cache, *results = run(weights, cache, forest, plan, drafts, key, limits[0])
            path, count, following = jax.device_get(results)
            forest = forest.extend(count)
            for request in requests:
                room = len(prompts[request]) + max_new_tokens - len(texts[request])
                new = [*path[request, 1 : count[request]].tolist(), int(following[request])][:room]
                stop = next((i for i, token in enumerate(new) if token in stop_tokens), len(new))
                said = new[: stop + 1]
                texts[request] += said
                ngrams.learn(texts[request], len(said))
                kept += min(int(count[request]) - 1, len(said))
            trees, passes = trees + len(requests), passes + 1
            if passes == 1:
                began = time.perf_counter()
    answers = [text[len(prompt) :] for prompt, text in zip(prompts, texts, strict=True)]
    return Answers(answers, trees, passes, guesses, kept, time.perf_counter() - began)


# --- The command --------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_task_arguments(parser, samples=4)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, help="guesses below each candidate, by level")
    arguments = parser.parse_args(argv)
    check_task_arguments(parser, arguments)
    if min(arguments.widths) < 1 or tree_size(arguments.widths) > 256:
        parser.error(
            f"--widths: expected numbers of at least 1 for trees of up to 256 candidates, got "
            f"{' '.join(map(str, arguments.widths))}"
        )
    if not 0.0 <= arguments.temperature < math.inf:
        parser.error(f"--temperature: expected a finite number of at least 0, got {arguments.temperature}")
    return arguments


def decode_plainly(model: Decoder, task: Task, prompts: list[list[int]], temperature: float, seed: int) -> tuple:
    """Decode token by token: return the answers, the steps that they took, and the seconds."""
    sampler = Sampler(
        model,
        max_requests=len(prompts),
        num_pages=len(prompts) * (2 + -(-(max(map(len, prompts)) + task.max_new_tokens) // PAGE_SIZE)),
        page_size=PAGE_SIZE,
    )
    options = {"stop_tokens": task.stop_tokens, "temperature": temperature, "seed": seed}
    sampler.decode(sampler.start(prompts), 1, **options)  # compiles
    state = sampler.start(prompts)
    began = time.perf_counter()
    _, generated = sampler.decode(state, task.max_new_tokens, **options)
    return generated.tokens, max(map(len, generated.tokens)), time.perf_counter() - began


def main(argv: Sequence[str] | None = None) -> None:
    """Decode with draft trees, then token by token, and report on both."""
    arguments = parse(argv)
    try:
        task = task_of(arguments)
        model = task.load()
        prompts = [prompt for prompt in task.prompts for _ in range(arguments.samples)]
        answers = speculate(
            model,
            prompts,
            max_new_tokens=task.max_new_tokens,
            stop_tokens=task.stop_tokens,
            temperature=arguments.temperature,
            widths=arguments.widths,
            seed=arguments.seed,
        )
        plain, steps, seconds = decode_plainly(model, task, prompts, arguments.temperature, arguments.seed)
    except (OSError, ValueError) as error:
        sys.exit(f"speculative: {error}")

    for question, text in enumerate(task.questions):
        first = question * arguments.samples
        given = [task.answer(question, tokens) for tokens in answers.tokens[first : first + arguments.samples]]
        print(f"{text:>12}   {'   '.join(answer or 'no answer' for answer in given)}")
    tokens = sum(map(len, answers.tokens))
    of_passes = tokens - len(prompts)  # the first token of each answer is the prompt's
    print(
        f"\ndraft trees      {tokens:,} tokens in {answers.passes} passes over trees of "
        f"{tree_size(arguments.widths)} candidates, {answers.seconds:.1f} s"
        f"\n                 {answers.kept:,} of {answers.guesses:,} guesses kept "
        f"({answers.kept / max(answers.guesses, 1):.1%}), {of_passes / max(answers.trees, 1):.2f} "
        f"tokens per request and pass"
        f"\ntoken by token   {sum(map(len, plain)):,} tokens in {steps} steps, {seconds:.1f} s"
    )
    if arguments.temperature == 0:
        same = sum(a == b for a, b in zip(answers.tokens, plain, strict=True))
        print(f"answers that are the same in every token: {same} of {len(plain)}")


if __name__ == "__main__":
    main()
