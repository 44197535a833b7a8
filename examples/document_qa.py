"""Many questions about a few long documents, answered together: a step reads each document once, not once per question.

Every question is asked of every document, in a prompt of its own. Which prefixes the prompts share is found from their
tokens alone. Then the same decoder answers again with sharing turned off: every request gets a path of its own, from a
root of its own, over the same physical pages. Nothing is copied, and loop, attention and sampling stay the same; but a
document is read again for each of its questions, as attention over an ordinary paged cache reads it.

    python examples/document_qa.py                             # the shipped documents; random weights, so noise
    python examples/document_qa.py --model DIR                 # a Hugging Face checkpoint of Qwen3 or Llama
    python examples/document_qa.py --model DIR --documents report.txt minutes.txt --questions questions.txt
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx
from tqdm import tqdm

from codec_jax import Forest, PagePool
from codec_jax.nnx import Decoder, DecoderConfig, Decoding, Sampler, open_checkpoint

DOCUMENTS = Path(__file__).parent / "documents"
PROMPT = "{document}\n\nQuestion: {question}\nAnswer:"
PAGE_SIZE = 16
STEPS = 16  # tokens between two looks at the answers


@dataclass(frozen=True)
class Model:
    """What answers, its weights still to come."""

    load: Callable[[], Decoder]
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    stop_tokens: tuple[int, ...] = ()
    max_context: float = math.inf  # tokens of prompt and answer together


@dataclass(frozen=True)
class Answers:
    """What one run decoded, and what it took."""

    tokens: list[list[int]]  # of each request
    seconds: float  # of a step, which gives every running request a token; median over intervals of STEPS steps
    state: Decoding


def read(name: str, file: Path) -> str:
    """Read a text; `name` says what it is for. Raises ValueError for a file that is missing, empty or not UTF-8."""
    try:
        text = file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: expected a file of UTF-8 text, got {file}: {error}") from error
    if not text:
        raise ValueError(f"{name}: expected some text, got {file}, which is empty; leave it out")
    return text


def checkpoint_model(directory: Path, dtype: str) -> Model:
    """Return the model of a checkpoint directory. Raises what `open_checkpoint` raises."""
    checkpoint = open_checkpoint(directory)
    return Model(
        load=partial(checkpoint.load, jnp.dtype(dtype), progress=True),
        encode=lambda text: checkpoint.tokenizer.encode(text).ids,
        decode=partial(checkpoint.tokenizer.decode, skip_special_tokens=True),
        stop_tokens=checkpoint.stop_tokens,
        max_context=checkpoint.max_context,
    )


def random_model(texts: Sequence[str]) -> Model:
    """Return a small decoder with random weights, whose tokens are the characters of the texts."""
    characters = sorted(set("".join(texts)))
    token = {character: i for i, character in enumerate(characters)}
    # Sizes of vocabulary, hidden layer and MLP; numbers of layers, q heads and kv heads; head size.
    sizes = (len(characters), 128, 384, 2, 4, 2, 64)
    config = DecoderConfig(*sizes, tied_embeddings=False, dtype=jnp.float32, param_dtype=jnp.float32)
    return Model(
        load=lambda: Decoder(config, nnx.Rngs(0)),
        encode=lambda text: [token[character] for character in text],
        decode=lambda tokens: "".join(characters[i] for i in tokens),
    )


def start(model: Model, prompts: Sequence[list[int]], max_new_tokens: int) -> tuple[Sampler, Decoding]:
    """Prefill the prompts, and take all pages of the answers, so that no page changes hands while they are decoded.

    That is what lets several runs begin with the same pages. Raises ValueError for a prompt too long for the model.
    """
    longest = max(map(len, prompts)) + max_new_tokens
    if longest > model.max_context:
        raise ValueError(
            f"--documents: expected at most {model.max_context} tokens of document, question and answer, which the "
            f"model was made for, got {longest}; shorten the document, or --max-new-tokens"
        )
    pages_of_prompts = len(Forest.from_sequences(prompts, page_size=PAGE_SIZE).used_pages)
    num_pages = pages_of_prompts + len(prompts) * -(-max_new_tokens // PAGE_SIZE)
    sizes = {"max_requests": len(prompts), "num_pages": num_pages, "page_size": PAGE_SIZE, "max_context": longest}
    sampler = Sampler(model.load(), **sizes, steps=STEPS)
    state = sampler.start(prompts, progress=True)
    forest, pool = state.forest.reserve(state.pool, max_new_tokens)
    return sampler, replace(state, forest=forest, pool=pool)


def answer(
    sampler: Sampler,
    state: Decoding,
    max_new_tokens: int,
    on_interval: Callable[[list[list[int]], list[int]], object],
    **sampling: Any,
) -> Answers:
    """Decode from a state of `start` to the end of every answer; `sampling` are options of `Sampler.decode`.

    `on_interval` gets the tokens of each request so far, and the requests that go on. `state` may be used once more
    with the cache of the state that is returned: in it, the pages of the prompts are as they were.
    """
    compiled, _ = sampler.decode(state, 1, **sampling)  # so that no compilation is timed
    state = replace(state, cache=compiled.cache)
    tokens: list[list[int]] = [[] for _ in state.requests]
    seconds = []
    left = max_new_tokens
    while left > 0 and state.requests:
        begin = time.perf_counter()
        state, new = sampler.decode(state, min(STEPS, left), **sampling)
        steps = max(map(len, new.tokens))
        seconds.append((time.perf_counter() - begin) / steps)
        left -= steps
        for request in state.requests:
            tokens[request] += new.tokens[request]
        state = sampler.prune(state, [request for request in state.requests if new.stopped[request]])
        on_interval(tokens, state.requests if left else [])
    return Answers(tokens, statistics.median(seconds), state)


class Printer:
    """Prints answers as they grow, one below another: the first that goes on, then those that wait behind it."""

    def __init__(self, headings: Sequence[str], decode: Callable[[list[int]], str]) -> None:
        """Remember how to turn tokens into text, and print the first heading."""
        self.headings, self.decode = headings, decode
        self.current = self.printed = 0
        print(f"\n{headings[0]}")

    def __call__(self, tokens: list[list[int]], running: list[int]) -> None:
        """Print what is new."""
        while self.current < len(tokens):
            text, ends = self.decode(tokens[self.current]), self.current not in running
            if not ends:
                text = text.rstrip("\ufffd")  # a character whose last bytes are still to come
            # A model may say anything, control sequences of the terminal included.
            new = "".join(character if character.isprintable() else " " for character in text[self.printed :])
            print(new, end="\n" if ends else "", flush=True)
            self.printed += len(new)
            if not ends:
                return
            self.current, self.printed = self.current + 1, 0
            if self.current < len(tokens):
                print(f"\n{self.headings[self.current]}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shipped = sorted(file for file in DOCUMENTS.glob("*.txt") if file.name != "questions.txt")
    parser.add_argument("--documents", type=Path, nargs="+", default=shipped, help="text files")
    parser.add_argument("--questions", type=Path, default=DOCUMENTS / "questions.txt", help="one question a line")
    parser.add_argument("--model", type=Path, help="directory of a checkpoint; without one, random weights")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of --model")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="tokens of an answer, at most (default: 64)")
    parser.add_argument("--temperature", type=float, help="default: 0 with --model, the most likely token; else 1")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    if arguments.max_new_tokens < 1:
        parser.error(f"--max-new-tokens: expected at least 1, got {arguments.max_new_tokens}")
    if arguments.temperature is None:
        arguments.temperature = 0.0 if arguments.model else 1.0
    if not 0.0 <= arguments.temperature < math.inf:
        parser.error(f"--temperature: expected a finite number of at least 0, got {arguments.temperature}")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Ask, answer twice, and compare."""
    arguments = parse(argv)
    try:
        documents = [(file.stem, read("--documents", file)) for file in arguments.documents]
        questions = [line for line in map(str.strip, read("--questions", arguments.questions).splitlines()) if line]
        asked = [(title, document, question) for title, document in documents for question in questions]
        texts = [PROMPT.format(document=document, question=question) for _, document, question in asked]
        model = checkpoint_model(arguments.model, arguments.dtype) if arguments.model else random_model(texts)
        prompts = [model.encode(text) for text in texts]
        sampler, state = start(model, prompts, arguments.max_new_tokens)
    except (OSError, ValueError) as error:
        sys.exit(f"document_qa: {error}")
    stored = int(state.forest.length.sum())
    print(f"{len(prompts)} prompts of {sum(map(len, prompts)):,} tokens, stored as {stored:,}: shared prefixes once")
    if arguments.model is None:
        print("Random weights: the answers are noise, and only the times mean something. See --model.")

    options = {name: getattr(arguments, name) for name in ("max_new_tokens", "temperature", "seed")}
    run = partial(answer, sampler, stop_tokens=model.stop_tokens, **options)
    shared = run(state, on_interval=Printer([f"{title}: {question}" for title, _, question in asked], model.decode))
    forest = state.forest.unshared()
    pool = PagePool.create(state.pool.num_pages, forest.used_pages)
    apart = replace(state, forest=forest, pool=pool, cache=shared.state.cache)
    print(flush=True)
    with tqdm(total=shared.state.traffic.generated_tokens, desc="without sharing", unit="token") as bar:
        apart = run(apart, on_interval=lambda tokens, _: bar.update(sum(map(len, tokens)) - bar.n))

    same = sum(left == right for left, right in zip(shared.tokens, apart.tokens, strict=True))
    once, again = shared.state.traffic.kv_tokens_read, apart.state.traffic.kv_tokens_read
    print(
        f"time per output token   {1e3 * shared.seconds:.2f} ms with sharing, {1e3 * apart.seconds:.2f} ms without "
        f"({apart.seconds / shared.seconds:.2f}x), all answers side by side"
        f"\nKV tokens read          {once:,} with sharing, {again:,} without ({again / once:.2f}x)"
        f"\nthe same answers        {same} of {len(prompts)}"
        f"{'' if same == len(prompts) else '; the others part where rounding decides between two tokens'}"
    )


if __name__ == "__main__":
    main()
