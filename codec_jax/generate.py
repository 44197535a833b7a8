"""Complete the prompts of a file, those that share prefixes together, with a Hugging Face checkpoint.

    python -m codec_jax.generate --model DIR --prompts prompts.jsonl --output out.jsonl --samples 8

A row of the prompts, a file or a pipe, is an object with `text`, or `tokens` (token ids). A row of the output has

    prompt         the row of the prompt, from 0
    sample         which of its samples, from 0; only with --samples above 1
    text, tokens   what was generated, the stop token included in tokens and left out of text
    logprobs       of each token, under the model's own distribution
    finish_reason  "stop" for a stop token, "length" for --max-new-tokens, "error" where logits were not finite

Rows come as they finish, in any order. After an interruption or a full disk, the same command goes on with what is
missing. A row with "error" has what was generated before, and is not made again, for the same weights would fail in
the same way; to have it tried once more, delete the row.

The exit status is 0 when all rows are there, 1 for an error, also if it is in rows only, 130 after an interruption.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer
from tqdm import tqdm

from codec_jax import checks
from codec_jax.forest.radix_tree import common_prefix
from codec_jax.nnx import PUBLISHED, Completion, Decoder, DecoderConfig, Sampler, open_checkpoint, random_decoder
from codec_jax.nnx.sampling import Sampling
from codec_jax.nnx.weights import parameter_shapes
from codec_jax.result_file import ResultFile

PAGE_SIZE = 16
#: Of the memory that weights leave free, what KV pages may take; the rest is for activations.
KV_SHARE = 0.8
#: KV pages where the device does not say how much memory it has.
DEFAULT_KV_GIB = 4.0


@dataclass(frozen=True)
class Model:
    """The model that completes the prompts, its weights still to come."""

    config: DecoderConfig
    load: Callable[[], Decoder]
    identity: dict[str, str]  # what tells it from another model
    tokenizer: Tokenizer | None = None  # None: prompts and completions are token ids only
    stop_tokens: tuple[int, ...] = ()
    max_context: float = math.inf  # tokens of prompt and completion together


def main(argv: Sequence[str] | None = None) -> None:
    """Check everything, then generate what the output does not have yet."""
    arguments = _parse(argv)
    _say("checking the model, the prompts and the output")
    try:
        if not arguments.output.parent.is_dir():
            raise NotADirectoryError(f"--output: expected a file in an existing directory, got {arguments.output}")
        model = _open_model(arguments)
        content = arguments.prompts.read_bytes()  # once: a pipe has nothing more to read
        prompts = read_prompts(arguments.prompts, content, model, arguments.max_new_tokens)
        drawing = {name: getattr(arguments, name) for name in ("temperature", "top_k", "top_p", "seed")}
        Sampling.of(model.stop_tokens, **drawing, vocab_size=model.config.vocab_size)
        num_pages = _max_pages(model.config, arguments.kv_cache_gib)
        sizes = {name: getattr(arguments, name) for name in ("samples", "max_new_tokens")}
        batches = make_batches(prompts, **sizes, max_requests=arguments.max_requests, num_pages=num_pages)
        inputs = {**model.identity, "prompts_sha256": hashlib.sha256(content).hexdigest(), "dtype": arguments.dtype}
        results = ResultFile(arguments.output, {**inputs, **sizes, **drawing}, len(prompts), arguments.samples)
    except (OSError, ValueError) as error:
        sys.exit(f"codec_jax.generate: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    everything = f"{len(prompts) * arguments.samples} completions"
    try:
        with closing(results):
            _generate(arguments, model, prompts, batches, results, drawing)
    except (OSError, KeyboardInterrupt) as error:
        reason = "interrupted" if isinstance(error, KeyboardInterrupt) else error
        _say(
            f"{reason}: {len(results.finished)} of {everything} are in {arguments.output}, "
            "and the same command goes on with the others"
        )
        # At once, for threads of XLA may still compile or compute: when the interpreter is taken down around them,
        # the process ends in a segmentation fault.
        os._exit(130 if isinstance(error, KeyboardInterrupt) else 1)
    _say(f"all {everything} are in {arguments.output}")
    if results.failed:
        lines = sorted({request // arguments.samples + 1 for request in results.failed})
        more = f" and {len(lines) - 20} more" if len(lines) > 20 else ""
        sys.exit(
            f"codec_jax.generate: logits that are not finite ended {len(results.failed)} of them, of the prompts in "
            f"lines {', '.join(map(str, lines[:20]))}{more}; are the weights finite?"
        )


def _say(text: str) -> None:
    print(f"codec_jax.generate: {text}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------- options


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="codec-jax generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    count = _number(int, "a positive whole number", 1, math.inf)
    seed = _number(int, "a whole number from 0 to 2**32 - 1", 0, 2**32)
    gib = _number(float, "a positive number of GiB", math.ulp(0.0), math.inf)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", type=Path, help="directory of a Hugging Face checkpoint of Qwen3 or Llama")
    model.add_argument("--random-weights", choices=PUBLISHED, help="measure with random weights of these sizes instead")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL file of prompts, or /dev/stdin")
    parser.add_argument("--output", type=Path, required=True, help="JSONL file of completions, new or to be continued")
    parser.add_argument("--max-new-tokens", type=count, default=256, help="tokens of a completion (default: 256)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the most likely token (default: 1.0)")
    parser.add_argument("--top-k", type=count, help="draw from the k most likely tokens only")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the most likely tokens that hold p only")
    parser.add_argument("--samples", type=count, default=1, help="completions of each prompt (default: 1)")
    parser.add_argument("--seed", type=seed, default=0, help="the same seed draws the same tokens (default: 0)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--max-requests", type=count, default=128, help="decoded at a time (default: 128)")
    parser.add_argument(
        "--kv-cache-gib",
        type=gib,
        help=f"memory for KV pages (default: {KV_SHARE:.0%}% of what the weights leave free on the device, "
        f"{DEFAULT_KV_GIB:g} where it does not say)",
    )
    return parser.parse_args(argv)


def _number(kind: type, expected: str, low: float, high: float) -> Callable[[str], float]:
    """Return a parser of numbers with low <= number < high."""

    def parse(text: str) -> float:
        try:
            if low <= (number := kind(text)) < high:
                return number
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")

    return parse


def _open_model(arguments: argparse.Namespace) -> Model:
    dtype = jnp.dtype(arguments.dtype)
    if arguments.model is None:
        config = replace(PUBLISHED[arguments.random_weights], dtype=dtype, param_dtype=dtype)
        load = partial(random_decoder, config, progress=True)
        return Model(config, load, {"model": f"random weights, {arguments.random_weights}"})
    checkpoint = open_checkpoint(arguments.model)
    identity = {"model": arguments.model.resolve().name}
    for file in sorted(checkpoint.files):
        status = file.stat()
        changed = datetime.fromtimestamp(status.st_mtime, UTC).isoformat()
        identity[f"model/{file.relative_to(arguments.model)}"] = f"{status.st_size} bytes, {changed}"
    return Model(
        config=replace(checkpoint.config, dtype=dtype, param_dtype=dtype),
        load=partial(checkpoint.load, dtype, progress=True),
        identity=identity,
        tokenizer=checkpoint.tokenizer,
        stop_tokens=checkpoint.stop_tokens,
        max_context=checkpoint.max_context,
    )


# ---------------------------------------------------------------------- prompts


def read_prompts(file: Path, content: bytes, model: Model, max_new_tokens: int) -> list[Int[np.ndarray, " tokens"]]:
    """Read one prompt a line of what a file holds, as token ids. Raises ValueError that lists every bad line."""
    lines = content.split(b"\n")
    if not lines[-1]:
        lines.pop()  # what follows the last newline is no line
    if not lines:
        raise ValueError(f"{file}: expected a prompt in each line, got an empty file")
    prompts, problems = [], []
    for i, line in enumerate(lines):
        try:
            prompts.append(_prompt(line, model))
            total = len(prompts[-1]) + max_new_tokens
            if total > model.max_context:
                raise ValueError(
                    f"expected at most {model.max_context} tokens, which the model was made for, got {total} with "
                    f"--max-new-tokens {max_new_tokens}"
                )
        except ValueError as error:
            problems.append(f"line {i + 1}: {error}")
    if problems:
        raise ValueError("\n  ".join([f"{file}: expected a prompt in each line, but", *problems]))
    return prompts


def _prompt(line: bytes, model: Model) -> Int[np.ndarray, " tokens"]:
    try:
        row = json.loads(line.decode("utf-8"))
        json.dumps(row, ensure_ascii=False).encode("utf-8")  # escapes may have made half a character of UTF-16
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected JSON, got {line[:40]!r}: {error}") from error
    if not isinstance(row, dict) or ("text" in row) == ("tokens" in row):
        raise ValueError(f'expected an object with either "text" or "tokens", got {line[:40]!r}')
    if "tokens" in row:
        tokens = row["tokens"]
        if not isinstance(tokens, list) or any(type(token) is not int for token in tokens):
            raise ValueError('expected a list of token ids as "tokens"')
    elif not isinstance(row["text"], str):
        raise ValueError(f'expected a string as "text", got {row["text"]!r}')
    elif model.tokenizer is None:
        raise ValueError('expected "tokens": random weights have no tokenizer for "text"')
    else:
        tokens = model.tokenizer.encode(row["text"]).ids
    if not tokens:
        raise ValueError("expected at least one token, got none")
    prompt = checks.int_vector("tokens", tokens)
    checks.tokens("tokens", prompt, model.config.vocab_size)
    return prompt


# ---------------------------------------------------------------------- batches


@dataclass(frozen=True)
class Batches:
    """Which requests are decoded together, and the sampler that holds any of the batches."""

    requests: list[list[int]]  # request r is sample r % samples of prompt r // samples
    max_requests: int
    num_pages: int
    max_context: int


def make_batches(
    prompts: Sequence[Int[np.ndarray, " tokens"]],
    *,
    samples: int,
    max_new_tokens: int,
    max_requests: int,
    num_pages: int,
) -> Batches:
    """Cut all requests into batches of at most `max_requests` whose KV certainly fits into `num_pages` pages.

    Prompts are taken in the order of their tokens, so that those which share prefixes meet in a batch wherever they
    stand in the file. Raises ValueError that lists the prompts which fit into no batch.
    """
    order = sorted(range(len(prompts)), key=lambda i: prompts[i].astype(">u4").tobytes())
    new_pages = -(-max_new_tokens // PAGE_SIZE)
    batches: list[list[int]] = [[]]
    used = max_used = 0
    problems = []
    for prompt, before in zip(order, [None, *order], strict=False):
        length = len(prompts[prompt])
        alone = -(-length // PAGE_SIZE) + new_pages
        if alone > num_pages:
            problems.append((prompt, alone))
            continue
        shared = 0 if before is None else common_prefix(prompts[before], prompts[prompt])
        # Where they part, a node may be split inside a page; further samples add only what they generate.
        beside = -(-(length - shared) // PAGE_SIZE) + (shared > 0) + new_pages
        for sample in range(samples):
            pages = new_pages if sample else beside
            if len(batches[-1]) == max_requests or used + pages > num_pages:
                batches.append([])
                used, pages = 0, alone
            batches[-1].append(prompt * samples + sample)
            used += pages
            max_used = max(max_used, used)
    if problems:
        need = [f"line {prompt + 1}: needs {pages} pages" for prompt, pages in sorted(problems)]
        room = f"{num_pages} pages of {PAGE_SIZE} tokens with --max-new-tokens (see --kv-cache-gib)"
        raise ValueError("\n  ".join([f"--prompts: expected prompts whose KV fits into {room}, but", *need]))
    return Batches(
        requests=batches,
        max_requests=max(map(len, batches)),
        num_pages=max_used,
        max_context=max(map(len, prompts)) + max_new_tokens,
    )


def prefill_tokens(prompts: Sequence[Int[np.ndarray, " tokens"]]) -> int:
    """Count what is left of the prompts of a batch, in the order of `make_batches`, if what they share counts once."""
    return sum(map(len, prompts)) - sum(map(common_prefix, prompts, prompts[1:]))


def _max_pages(config: DecoderConfig, gib: float | None) -> int:
    """Pages that fit into the memory for KV."""
    item = jnp.dtype(config.dtype).itemsize
    if gib is None:
        memory = jax.devices()[0].memory_stats()
        gib = DEFAULT_KV_GIB
        if memory is not None:
            weights = sum(math.prod(parameter.shape) for parameter in parameter_shapes(config).values()) * item
            gib = KV_SHARE * (memory["bytes_limit"] - memory["bytes_in_use"] - weights) / 2**30
    page = 2 * config.num_layers * PAGE_SIZE * config.num_kv_heads * config.head_dim * item
    return max(0, int(gib * 2**30 // page))


# ---------------------------------------------------------------------- generation


def _generate(
    arguments: argparse.Namespace,
    model: Model,
    prompts: list[Int[np.ndarray, " tokens"]],
    batches: Batches,
    results: ResultFile,
    drawing: dict[str, Any],
) -> None:
    """Generate what the result file does not have yet."""
    # Batches and sizes come from all prompts, so that a resumed run decodes as the first one would have.
    todo = [[request for request in batch if request not in results.finished] for batch in batches.requests]
    todo = [batch for batch in todo if batch]
    if not todo:
        _say("nothing to do")
        return
    given = prefilled = generated = 0
    total = len(prompts) * arguments.samples
    with tqdm(total=total, initial=len(results.finished), unit="completion", desc="loading", miniters=0) as bar:
        sampler = Sampler(
            model.load(),
            max_requests=batches.max_requests,
            num_pages=batches.num_pages,
            page_size=PAGE_SIZE,
            max_context=batches.max_context,
        )
        start = time.perf_counter()

        def on_tokens(stage: str, *_: Any) -> None:
            bar.set_description_str(stage, refresh=False)
            bar.update(0)  # the clock goes on

        def on_completion(batch: list[int], i: int, completion: Completion) -> None:
            nonlocal generated
            kept = completion.tokens[: -1 if completion.finish_reason == "stop" else None]
            text = None if model.tokenizer is None else model.tokenizer.decode(kept, skip_special_tokens=True)
            results.write(batch[i], text, completion)
            generated += len(completion.tokens)
            bar.update()

        for number, batch in enumerate(todo, 1):
            stage = f"batch {number} of {len(todo)}, "
            bar.set_description_str(stage + "compiling and prefill" if number == 1 else stage + "prefill")
            texts = [prompts[request // arguments.samples] for request in batch]
            given += sum(map(len, texts))
            prefilled += prefill_tokens(texts)
            sampler.generate(
                texts,
                streams=batch,
                max_new_tokens=arguments.max_new_tokens,
                stop_tokens=model.stop_tokens,
                on_tokens=partial(on_tokens, stage + "decoding"),
                on_completion=partial(on_completion, batch),
                progress=True,
                **drawing,
            )
    seconds = time.perf_counter() - start
    _say(
        f"{generated} tokens in {seconds:.1f} s, {generated / seconds:.1f} tokens/s, compilation included; "
        f"{given} tokens of prompts, {prefilled} of them prefilled: sharing factor {given / prefilled:.1f}"
    )


if __name__ == "__main__":
    main()
