"""Questions about long documents, all at once: shared prefixes are read once, and the answers stay the same.

    python examples/document_qa.py                     # shipped documents, random weights: no download, two minutes
    python examples/document_qa.py --svg forest.svg    # and a drawing of the forest
    python examples/document_qa.py --model DIR         # a Hugging Face checkpoint of Qwen3 or Llama
    python examples/document_qa.py --model DIR --documents report.txt minutes.txt --questions questions.txt

Every question is asked of every document, in a prompt of its own. Which prefixes the prompts share is found from their
tokens alone. All prompts are answered side by side, and then once more with sharing turned off: every request gets a
path of its own over the same physical pages. Nothing is copied, and loop, attention and sampling stay the same; but a
document is read again for each of its questions. Random weights answer noise, which takes as long.

In the end the questions come one after another to an engine, as they do where somebody waits for each answer. The first
one about a document waits until it is computed; for the others it is in the engine's cache.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from options import command, new_file, number
from tqdm import tqdm

if TYPE_CHECKING:
    from codec_jax.nnx import Decoding, Engine, Generated, Sampler

DOCUMENTS = Path(__file__).parent / "documents"
PROMPT = "{document}\n\nQuestion: {question}\nAnswer:"
PAGE_SIZE = 16
STEPS = 16  # tokens between two looks at the answers


@dataclass(frozen=True)
class Answers:
    """What one run decoded, and what it took."""

    generated: Generated
    seconds: float  # of a step, which gives every running request a token
    state: Decoding


def answer(sampler: Sampler, state: Decoding, max_new_tokens: int, title: str, **sampling: Any) -> Answers:
    """Decode from a state to the end of every answer; the pages of the prompts stay as they were."""
    with tqdm(total=len(state.requests) * max_new_tokens, desc=f"{title}, compiling", unit="token") as bar:
        compiled, _ = sampler.decode(state, 1, **sampling)
        state = replace(state, cache=compiled.cache)
        bar.set_description(title)
        begin = time.perf_counter()
        state, new = sampler.decode(
            state, max_new_tokens, on_tokens=lambda _, tokens: bar.update(len(tokens)), **sampling
        )
        seconds = time.perf_counter() - begin
        bar.update(bar.total - bar.n)  # what was left of answers that ended by themselves
    return Answers(new, seconds / max(map(len, new.tokens)), state)


def ask_in_turn(engine: Engine, prompts: Sequence[Sequence[int]]) -> str:
    """Ask for the first token of each answer, one after another, and report how long it takes."""
    from codec_jax.nnx import SamplingParams

    engine.warm_up()
    of_new, of_known = [], []  # seconds for prompts of which hardly anything was there, and for the others
    for prompt in tqdm(prompts, desc="one after another", unit="question"):
        begin = time.perf_counter()
        [request] = engine.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0))
        (of_known if 2 * request.cached_tokens > len(prompt) else of_new).append(time.perf_counter() - begin)
    new, known = (f"{1e3 * np.mean(times):.1f} ms" if times else "-" for times in (of_new, of_known))
    stats = engine.stats
    return (
        f"{'one by one':16}{new} to the first token for the first question about a document, {known} for the others;\n"
        f"{'':16}{stats.cached_tokens:,} of {stats.prompt_tokens:,} tokens were in the cache"
    )


def report(shared: Answers, apart: Answers) -> str:
    """Compare two runs."""
    once, again = (answers.state.traffic.kv_tokens_read for answers in (shared, apart))
    ours, theirs = shared.generated, apart.generated
    same = [a == b for a, b in zip(ours.tokens, theirs.tokens, strict=True)]
    pairs = zip(same, ours.logprobs, theirs.logprobs, strict=True)
    error = max((np.abs(np.subtract(a, b)).max() for equal, a, b in pairs if equal), default=0)
    agreement = f"{sum(same)} of {len(same)} the same in every token, log-probabilities within {error:.0e}"
    return (
        f"{'':16}{'with sharing':>14}{'without':>14}\n"
        f"{'time per token':16}{1e3 * shared.seconds:11.1f} ms{1e3 * apart.seconds:11.1f} ms"
        f"{apart.seconds / shared.seconds:9.2f}x   of all answers side by side\n"
        f"{'KV tokens read':16}{once:14,}{again:14,}{again / once:9.2f}x   the sharing factor\n"
        f"{'answers':16}{agreement}{'' if all(same) else '; the others part where rounding decides'}"
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = command(__doc__, temperature=0.0)
    shipped = sorted(file for file in DOCUMENTS.glob("*.txt") if file.name != "questions.txt")
    parser.add_argument("--documents", type=Path, nargs="+", default=shipped, help="text files")
    parser.add_argument("--questions", type=Path, default=DOCUMENTS / "questions.txt", help="one question a line")
    parser.add_argument("--model", type=Path, help="directory of a checkpoint; without one, random weights")
    parser.add_argument("--max-new-tokens", type=number(int, 1, 100_000), default=64, help="of an answer (default: 64)")
    parser.add_argument("--svg", type=new_file, help="also draw the forest of the prompts, to this file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Ask, answer twice, and compare."""
    arguments = parse(argv)
    print("document_qa: answers many questions at once, with shared prefixes and then without", flush=True)
    # Imported here, as JAX takes a while.
    from models import from_checkpoint, random_weights, read_text

    from codec_jax import Forest, PagePool, show
    from codec_jax.nnx import Engine, Sampler

    try:
        documents = [(file.stem, read_text("--documents", file)) for file in arguments.documents]
        lines = read_text("--questions", arguments.questions).splitlines()
        questions = [line.strip() for line in lines if line.strip()]
        asked = [(title, document, question) for title, document in documents for question in questions]
        texts = [PROMPT.format(document=document, question=question) for _, document, question in asked]
        model = from_checkpoint(arguments.model) if arguments.model else random_weights()
        prompts, room = [model.encode(text) for text in texts], arguments.max_new_tokens
        longest = max(map(len, prompts)) + room
        if longest > model.max_context:
            raise ValueError(
                f"--documents: expected at most {model.max_context} tokens of prompt and answer, which the model was "
                f"made for, got {longest}; shorten the text, or --max-new-tokens"
            )
        weights = model.load()
    except (OSError, ValueError) as error:
        sys.exit(f"document_qa: {error}")
    note = "" if arguments.model else "; random weights, so the answers are noise"
    print(f"{len(questions)} questions about each of {len(documents)} documents{note}", flush=True)
    num_pages = len(Forest.from_sequences(prompts, page_size=PAGE_SIZE).used_pages)
    num_pages += len(prompts) * -(-room // PAGE_SIZE)
    sizes = {"max_requests": len(prompts), "num_pages": num_pages, "page_size": PAGE_SIZE, "max_context": longest}
    sampler = Sampler(weights, **sizes, steps=STEPS)
    state = sampler.start(prompts, progress=True)
    # The answers' pages are taken here, so that no page changes hands later and both runs can begin with the same ones.
    forest, pool = state.forest.reserve(state.pool, room)
    state = replace(state, forest=forest, pool=pool)
    sampling = {"temperature": arguments.temperature, "seed": arguments.seed, "stop_tokens": model.stop_tokens}
    shared = answer(sampler, state, room, "with sharing", **sampling)
    forest = state.forest.unshared()
    pool = PagePool.create(state.pool.num_pages, forest.used_pages)
    apart = replace(state, forest=forest, pool=pool, cache=shared.state.cache)
    apart = answer(sampler, apart, room, "without sharing", **sampling)

    if arguments.model:
        for (title, _, question), tokens in zip(asked, shared.generated.tokens, strict=True):
            # A model may say anything, control sequences of the terminal included.
            text = "".join(character if character.isprintable() else " " for character in model.decode(tokens))
            print(f"\n{title}: {question}\n{text}")
    print()
    show(state.forest)
    print("\n" + report(shared, apart))
    if arguments.svg:
        arguments.svg.write_text(state.forest.svg(), "utf-8")
        print(f"{'drawing':16}{arguments.svg}")
    del state, shared, apart  # whose pages are not needed any more
    print(ask_in_turn(Engine(weights, **sizes), prompts))


if __name__ == "__main__":
    main()
