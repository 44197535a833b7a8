"""Complete the prompts of a file, those that share prefixes together, with a Hugging Face checkpoint.

    python -m codec_jax.generate --model DIR --prompts prompts.jsonl --output out.jsonl --samples 8

A row of the prompts is an object with `text`, or `tokens` (token ids). A row of the output has

    prompt         the row of the prompt, from 0
    sample         which of its samples, from 0; only with --samples above 1
    text, tokens   what was generated, the stop token included in tokens and left out of text
    logprobs       of each token, under the model's own distribution
    finish_reason  "stop" for a stop token, "length" for --max-new-tokens

Rows come as they finish, in any order. After an interruption, the same command goes on with what is missing.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from codec_jax.nnx import PUBLISHED, Completion, Decoder, DecoderConfig, Sampler, open_checkpoint, options
from codec_jax.nnx.published import random_decoder
from codec_jax.nnx.weights import parameter_shapes
from codec_jax.result_file import ResultFile

PAGE_SIZE = 16
#: Of the memory that weights leave free, what KV pages may take; the rest is for activations.
KV_SHARE = 0.8
#: KV pages where the device does not say how much memory it has.
DEFAULT_KV_GIB = 4.0


@dataclass(frozen=True)
class Model:
    """What the prompts are completed with, its weights still to come."""

    config: DecoderConfig
    load: Callable[[], Decoder]
    tokenizer: Tokenizer | None  # None: prompts and completions are token ids only
    stop_tokens: tuple[int, ...]
    max_context: float  # tokens of prompt and completion together
    identity: dict[str, str]  # what tells it from another model


def main(argv: Sequence[str] | None = None) -> None:
    """Check everything, then generate."""
    arguments = _parse(argv)
    try:
        if not arguments.output.parent.is_dir():
            raise NotADirectoryError(f"--output: expected a file in an existing directory, got {arguments.output}")
        model = _open_model(arguments)
        prompts = read_prompts(arguments.prompts, model, arguments.max_new_tokens)
        options.check_sampling(
            model.stop_tokens,
            arguments.temperature,
            arguments.top_k,
            arguments.top_p,
            arguments.seed,
            model.config.vocab_size,
        )
        num_pages = _most_pages(model.config, arguments.kv_cache_gib)
        batches = make_batches(
            prompts,
            samples=arguments.samples,
            max_new_tokens=arguments.max_new_tokens,
            max_requests=arguments.max_requests,
            num_pages=num_pages,
        )
        results = ResultFile(arguments.output, _options(arguments, model), len(prompts), arguments.samples)
    except (OSError, ValueError) as error:
        sys.exit(f"codec_jax.generate: {error}")
    with results:
        try:
            _generate(arguments, model, prompts, batches, results)
        except KeyboardInterrupt:
            print(
                f"\ncodec_jax.generate: interrupted with {len(results.finished)} of "
                f"{len(prompts) * arguments.samples} completions in {arguments.output}; "
                "the same command goes on with the others",
                file=sys.stderr,
            )
            sys.exit(130)


# ---------------------------------------------------------------------- options


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m codec_jax.generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", type=Path, help="directory of a Hugging Face checkpoint of Qwen3 or Llama")
    model.add_argument("--random-weights", choices=PUBLISHED, help="measure with random weights of these sizes instead")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL file of prompts")
    parser.add_argument("--output", type=Path, required=True, help="JSONL file of completions, new or to be continued")
    parser.add_argument("--max-new-tokens", type=_positive, default=256, help="tokens of a completion (default: 256)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the most likely token (default: 1.0)")
    parser.add_argument("--top-k", type=_positive, help="draw from the k most likely tokens only")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the most likely tokens that hold p only")
    parser.add_argument("--samples", type=_positive, default=1, help="completions of each prompt (default: 1)")
    parser.add_argument("--seed", type=_seed, default=0, help="the same seed draws the same tokens (default: 0)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--max-requests", type=_positive, default=128, help="decoded at a time (default: 128)")
    parser.add_argument(
        "--kv-cache-gib",
        type=_gib,
        help=f"memory for KV pages (default: {KV_SHARE:.0%}% of what the weights leave free on the device, "
        f"{DEFAULT_KV_GIB:g} where it does not say)",
    )
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to 2**32 - 1, got {text!r}")
    return int(text)


def _gib(text: str) -> float:
    try:
        if 0 < float(text) < math.inf:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected a positive number of GiB, got {text!r}")


def _open_model(arguments: argparse.Namespace) -> Model:
    dtype = jnp.dtype(arguments.dtype)
    if arguments.model is None:
        config = replace(PUBLISHED[arguments.random_weights], dtype=dtype, param_dtype=dtype)
        return Model(
            config=config,
            load=partial(random_decoder, config, progress=True),
            tokenizer=None,
            stop_tokens=(),
            max_context=math.inf,
            identity={"model": f"random weights, {arguments.random_weights}"},
        )
    checkpoint = open_checkpoint(arguments.model)
    files = {*arguments.model.glob("*.json"), *checkpoint.files}
    modified = max(file.stat().st_mtime for file in files)
    return Model(
        config=replace(checkpoint.config, dtype=dtype, param_dtype=dtype),
        load=partial(checkpoint.load, dtype, progress=True),
        tokenizer=checkpoint.tokenizer,
        stop_tokens=checkpoint.stop_tokens,
        max_context=checkpoint.max_context,
        identity={
            "model": str(arguments.model.resolve()),
            "model_modified": datetime.datetime.fromtimestamp(modified, datetime.UTC).isoformat(),
        },
    )


def _options(arguments: argparse.Namespace, model: Model) -> dict[str, Any]:
    """What the rows of the output depend on."""
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "samples", "seed", "dtype")
    return {
        **model.identity,
        "prompts_sha256": hashlib.sha256(arguments.prompts.read_bytes()).hexdigest(),
        **{name: getattr(arguments, name) for name in names},
    }


# ---------------------------------------------------------------------- prompts


def read_prompts(file: Path, model: Model, max_new_tokens: int) -> list[Int[np.ndarray, " tokens"]]:
    """Read one prompt a line, as token ids. Raises ValueError that lists every bad line."""
    lines = file.read_bytes().split(b"\n")
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
    used = most_used = 0
    problems = []
    for prompt, before in zip(order, [None, *order], strict=False):
        length = len(prompts[prompt])
        alone = -(-length // PAGE_SIZE) + new_pages
        if alone > num_pages:
            problems.append((prompt, alone))
            continue
        shared = 0 if before is None else _shared_tokens(prompts[before], prompts[prompt])
        # Where they part, a node may be split inside a page; further samples add only what they generate.
        beside = -(-(length - shared) // PAGE_SIZE) + (shared > 0) + new_pages
        for sample in range(samples):
            pages = new_pages if sample else beside
            if len(batches[-1]) == max_requests or used + pages > num_pages:
                batches.append([])
                used, pages = 0, alone
            batches[-1].append(prompt * samples + sample)
            used += pages
            most_used = max(most_used, used)
    if problems:
        raise ValueError(
            "\n  ".join(
                [
                    f"--prompts: expected prompts whose KV fits into {num_pages} pages of {PAGE_SIZE} tokens with "
                    "--max-new-tokens (see --kv-cache-gib), but",
                    *(f"line {prompt + 1}: needs {pages} pages" for prompt, pages in sorted(problems)),
                ]
            )
        )
    return Batches(
        requests=batches,
        max_requests=max(map(len, batches)),
        num_pages=most_used,
        max_context=max(map(len, prompts)) + max_new_tokens,
    )


def _shared_tokens(left: Int[np.ndarray, " a"], right: Int[np.ndarray, " b"]) -> int:
    least = min(len(left), len(right))
    different = np.flatnonzero(left[:least] != right[:least])
    return int(different[0]) if different.size else least


def _most_pages(config: DecoderConfig, gib: float | None) -> int:
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
) -> None:
    """Generate what the result file does not have yet."""
    samples = arguments.samples
    # Batches and sizes come from all prompts, so that a resumed run decodes as the first one would have.
    todo = [[request for request in batch if request not in results.finished] for batch in batches.requests]
    todo = [batch for batch in todo if batch]
    if not todo:
        return
    sampler = Sampler(
        model.load(),
        max_requests=batches.max_requests,
        num_pages=batches.num_pages,
        page_size=PAGE_SIZE,
        max_context=batches.max_context,
    )
    written, start = 0, time.perf_counter()
    with tqdm(total=len(prompts) * samples, initial=len(results.finished), unit="completion") as bar:

        def write(batch: list[int], i: int, completion: Completion) -> None:
            nonlocal written
            text = None
            if model.tokenizer is not None:
                text = model.tokenizer.decode(completion.tokens, skip_special_tokens=True)
            results.write(batch[i], text, completion)
            written += len(completion.tokens)
            bar.update()

        for batch in todo:
            sampler.generate(
                [prompts[request // samples] for request in batch],
                streams=batch,
                max_new_tokens=arguments.max_new_tokens,
                stop_tokens=model.stop_tokens,
                temperature=arguments.temperature,
                top_k=arguments.top_k,
                top_p=arguments.top_p,
                seed=arguments.seed,
                on_completion=partial(write, batch),
                progress=True,
            )
    print(f"{written} tokens in {time.perf_counter() - start:.1f} s, compilation included", file=sys.stderr)


if __name__ == "__main__":
    main()
