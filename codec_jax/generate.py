"""Complete the prompts of a file, those that share prefixes together, with a Hugging Face checkpoint.

    python -m codec_jax.generate --model DIR --prompts prompts.jsonl --output out.jsonl --samples 8

A row of the prompts, a file or a pipe, is an object with one of

    text           taken as it is
    messages       a chat, by the checkpoint's template
    tokens         token ids

A row of the output has

    prompt         the row of the prompt, from 0
    sample         which of its samples, from 0; only with --samples above 1
    text, tokens   what was generated; tokens include the stop token or string, text does not
    logprobs       of each token, under the model's own distribution
    finish_reason  "stop", "length" for --max-new-tokens, or "error" where logits were not finite

Rows come as they finish, in any order. After an interruption or a full disk, the same command goes on with what is
missing. A row with "error" has what was generated before, and is not made again, for the same weights would fail in
the same way; to have it tried once more, delete the row.

The exit status is 0 when all rows are there, 1 for an error, also if it is in rows only, 130 after an interruption.
"""

from __future__ import annotations

import argparse
import codecs
import hashlib
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int
from tokenizers import Tokenizer
from tqdm import tqdm

from codec_jax import checks
from codec_jax.command_line import add_engine_options, count_parser, number_parser, open_model
from codec_jax.interrupts import interrupts
from codec_jax.nnx import (
    PUBLISHED,
    ChatTemplate,
    Completion,
    Decoder,
    DecoderConfig,
    Engine,
    Request,
    SamplingParams,
    TextStream,
    random_decoder,
)
from codec_jax.nnx.memory import KV_DTYPES, pages_of_replicas, take_most_of_the_gpu
from codec_jax.nnx.params import check_stop_tokens
from codec_jax.nnx.replicas import device_groups, replicated
from codec_jax.nnx.shards import PlacedDecoder
from codec_jax.nnx.text import token_ids
from codec_jax.nnx.weights import parameter_shapes
from codec_jax.result_file import ResultFile

PAGE_SIZE = 16
#: Options that say how tokens are drawn, by the names that `SamplingParams` has for them, and when a text ends.
DRAWING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
STOPS = ("stop", "stop_token")


@dataclass(frozen=True)
class Model:
    """The model that completes the prompts, its weights still to come."""

    config: DecoderConfig
    load: Callable[[Mesh | None], Decoder | PlacedDecoder]  # to the devices of a mesh; None is the default device
    identity: dict[str, str]  # what tells it from another model
    tokenizer: Tokenizer | None = None  # None: prompts and completions are token ids only
    chat_template: ChatTemplate | None = None
    stop_tokens: tuple[int, ...] = ()
    max_context: float = math.inf  # tokens of prompt and completion together


def main(argv: Sequence[str] | None = None) -> None:
    """Check everything, then generate what the output does not have yet."""
    arguments = _parse(argv)
    take_most_of_the_gpu()
    _say("checking the model, the prompts and the output")
    try:
        if not arguments.output.parent.is_dir():
            raise NotADirectoryError(f"--output: expected a file in an existing directory, got {arguments.output}")
        if arguments.invariant and arguments.context_parallel > 1:
            raise ValueError(
                f"--invariant: expected no --context-parallel, which adds up parts, got {arguments.context_parallel}"
            )
        model = _open_model(arguments)
        content = _content(arguments.prompts)  # once: a pipe has nothing more to read
        prompts = read_prompts(arguments.prompts, content, model, arguments.max_new_tokens)
        if len(prompts) * arguments.samples >= 2**31:
            raise ValueError(
                f"--samples: expected fewer than 2**31 completions in all, got {len(prompts)} prompts with "
                f"{arguments.samples} samples"
            )
        params = _params(arguments, model)
        groups = device_groups(
            model.config,
            data=arguments.data_parallel,
            context=arguments.context_parallel,
            tensor=arguments.tensor_parallel,
        )
        num_pages = _num_pages(arguments, model, prompts, groups)
        inputs = {**model.identity, "prompts_sha256": hashlib.sha256(content).hexdigest()}
        options = {
            name: getattr(arguments, name)
            for name in ("dtype", "kv_dtype", "samples", "max_new_tokens", "invariant", *DRAWING, *STOPS)
        }
        results = ResultFile(arguments.output, {**inputs, **options}, len(prompts), arguments.samples)
    except (OSError, ValueError) as error:
        sys.exit(f"codec_jax.generate: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    everything = f"{len(prompts) * arguments.samples} completions"
    try:
        with closing(results), interrupts() as check:
            _generate(arguments, model, prompts, params, groups, num_pages, results, check)
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
    count = count_parser()
    seed = number_parser(int, "a whole number from 0 to 2**32 - 1", 0, 2**32)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", type=Path, help="directory of a Hugging Face checkpoint")
    model.add_argument("--random-weights", choices=PUBLISHED, help="measure with random weights of these sizes instead")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL file of prompts, or /dev/stdin")
    parser.add_argument("--output", type=Path, required=True, help="JSONL file of completions, new or to be continued")
    parser.add_argument("--max-new-tokens", type=count, default=256, help="tokens of a completion (default: 256)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the most likely token (default: 1.0)")
    parser.add_argument("--top-k", type=count, help="draw from the k most likely tokens only")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the most likely tokens that hold p only")
    parser.add_argument("--min-p", type=float, default=0.0, help="leave out tokens below p times the most likely one")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1 for less of what was said")
    parser.add_argument(
        "--stop", action="append", default=[], help="a string that ends a text, several times if needed"
    )
    parser.add_argument("--stop-token", type=int, action="append", default=[], help="a token id that does, likewise")
    parser.add_argument("--samples", type=count, default=1, help="completions of each prompt (default: 1)")
    parser.add_argument("--seed", type=seed, default=0, help="the same seed draws the same tokens (default: 0)")
    add_engine_options(parser)
    return parser.parse_args(argv)


def _open_model(arguments: argparse.Namespace) -> Model:
    dtypes = {
        "dtype": jnp.dtype(arguments.dtype),
        "param_dtype": jnp.dtype(arguments.dtype),
    }
    of_cache = KV_DTYPES.get(arguments.kv_dtype, {})
    if arguments.model is None:
        config = replace(PUBLISHED[arguments.random_weights], **dtypes, **of_cache)

        def drawn(mesh: Mesh | None) -> Decoder | PlacedDecoder:
            return random_decoder(config, mesh=mesh, progress=True)

        return Model(config, drawn, {"model": f"random weights, {arguments.random_weights}"})
    checkpoint = open_model(arguments.model)
    identity = {"model": arguments.model.resolve().name}
    for file in sorted(checkpoint.files):
        status = file.stat()
        changed = datetime.fromtimestamp(status.st_mtime, UTC).isoformat()
        identity[f"model/{file.relative_to(arguments.model)}"] = f"{status.st_size} bytes, {changed}"
    return Model(
        config=replace(checkpoint.config, **dtypes, **of_cache),
        load=lambda mesh: checkpoint.load(dtypes["dtype"], mesh=mesh, progress=True, **of_cache),
        identity=identity,
        tokenizer=checkpoint.tokenizer,
        chat_template=checkpoint.chat_template,
        stop_tokens=checkpoint.stop_tokens,
        max_context=checkpoint.max_context,
    )


# ---------------------------------------------------------------------- prompts


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ValueError(f"--prompts: expected a file that can be read, got {file}: {error.strerror}") from error


def read_prompts(file: Path, content: bytes, model: Model, max_new_tokens: int) -> list[Int[np.ndarray, " tokens"]]:
    """Read one prompt a line of what a file holds, as token ids. Raises ValueError that lists every bad line."""
    lines = content.removeprefix(codecs.BOM_UTF8).split(b"\n")
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
    kinds = [kind for kind in ("text", "messages", "tokens") if isinstance(row, dict) and kind in row]
    if len(kinds) != 1:
        raise ValueError(f'expected an object with one of "text", "messages" and "tokens", got {line[:40]!r}')
    [kind], given = kinds, row[kinds[0]]
    if kind == "tokens":
        if not isinstance(given, list) or any(type(token) is not int for token in given):
            raise ValueError('expected a list of token ids as "tokens"')
        tokens = given
    elif model.tokenizer is None:
        raise ValueError(f'expected "tokens": random weights have no tokenizer for "{kind}"')
    elif kind == "messages":
        if model.chat_template is None:
            raise ValueError(
                f'expected "text" or "tokens": {model.identity["model"]} has no chat template for "messages"'
            )
        tokens = model.chat_template.encode(model.tokenizer, given)
    elif isinstance(given, str):
        tokens = token_ids("text", given, model.tokenizer)
    else:
        raise ValueError(f'expected a string as "text", got {given!r:.100}')
    if not tokens:
        raise ValueError("expected at least one token, got none")
    prompt = checks.int_vector("tokens", tokens)
    checks.tokens("tokens", prompt, model.config.vocab_size)
    return prompt


# ---------------------------------------------------------------------- generation


def _params(arguments: argparse.Namespace, model: Model) -> SamplingParams:
    """Return how all requests are decoded. Raises ValueError for options that cannot be."""
    if arguments.stop:
        if model.tokenizer is None:
            raise ValueError(f"--stop: expected none, for random weights have no tokenizer, got {arguments.stop}")
        TextStream(model.tokenizer, arguments.stop)  # refuses what no text can have
    check_stop_tokens("--stop-token", arguments.stop_token, model.stop_tokens, model.config.vocab_size)
    params = SamplingParams(
        max_tokens=arguments.max_new_tokens,
        stop=arguments.stop,
        stop_tokens=(*model.stop_tokens, *arguments.stop_token),
        **{name: getattr(arguments, name) for name in DRAWING},
    )
    params.check(model.config.vocab_size)
    return params


def _num_pages(
    arguments: argparse.Namespace,
    model: Model,
    prompts: Sequence[Int[np.ndarray, " tokens"]],
    groups: Sequence[Mesh | None],
) -> int:
    """Return the KV pages to allocate in each replica: what fits, or what all requests take if they share nothing.

    Raises ValueError that lists the prompts which can never fit.
    """
    parameters = sum(math.prod(parameter.shape) for parameter in parameter_shapes(model.config).values())
    weights = parameters * jnp.dtype(arguments.dtype).itemsize
    sizes = {"max_requests": arguments.max_requests, "invariant": arguments.invariant}
    memory = {"gib": arguments.kv_cache_gib, "weights_to_come": weights}
    room = pages_of_replicas(model.config, groups, PAGE_SIZE, **sizes, **memory)
    alone = [-(-(len(prompt) + arguments.max_new_tokens - 1) // PAGE_SIZE) for prompt in prompts]
    need = [f"line {line}: needs {pages} pages" for line, pages in enumerate(alone, 1) if pages > room]
    if need:
        pages = f"{room} pages of {PAGE_SIZE} tokens with --max-new-tokens (see --kv-cache-gib)"
        raise ValueError("\n  ".join([f"--prompts: expected prompts whose KV fits into {pages}, but", *need]))
    devices = arguments.context_parallel  # each has as many pages
    return min(room, -(-sum(alone) * arguments.samples // devices) * devices)


def _generate(
    arguments: argparse.Namespace,
    model: Model,
    prompts: list[Int[np.ndarray, " tokens"]],
    params: SamplingParams,
    groups: Sequence[Mesh | None],
    num_pages: int,
    results: ResultFile,
    check_interrupt: Callable[[], None],
) -> None:
    """Generate what the result file does not have yet: request r is sample r % samples of prompt r // samples."""
    samples, total = arguments.samples, len(prompts) * arguments.samples
    # In the order of their tokens, prompts that share a prefix meet wherever they stand in the file.
    order = sorted(range(len(prompts)), key=lambda i: prompts[i].astype(">u4").tobytes())
    numbers = (prompt * samples + sample for prompt in order for sample in range(samples))
    todo = deque(number for number in numbers if number not in results.finished)
    if not todo:
        _say("nothing to do")
        return
    texts = [prompts[number // samples] for number in todo]
    given = sum(map(len, texts))
    with tqdm(total=total, initial=len(results.finished), unit="completion", desc="loading", miniters=0) as bar:
        engine = replicated(
            [
                Engine(  # of the same sizes whatever is left to do, so that a run goes on as it began
                    model.load(mesh),
                    max_requests=min(arguments.max_requests, total),
                    num_pages=num_pages,
                    page_size=PAGE_SIZE,
                    max_context=max(map(len, prompts)) + arguments.max_new_tokens,
                    tokenizer=model.tokenizer,
                    invariant=arguments.invariant,
                )
                for mesh in groups
            ]
        )
        bar.set_description_str("compiling")
        start = time.perf_counter()
        submitted: dict[Request, int] = {}
        while todo or submitted:
            while todo and len(submitted) < 2 * arguments.max_requests * len(groups):  # enough for rows that get free
                number = todo.popleft()
                request = engine.submit(prompts[number // samples], replace(params, stream=number))
                submitted[request] = number
            for request in engine.step():
                bar.set_description_str("generating", refresh=False)
                if request.finish_reason is not None:
                    number = submitted.pop(request)
                    text = None if model.tokenizer is None else request.text
                    completion = Completion(number // samples, request.tokens, request.logprobs, request.finish_reason)
                    results.write(number, text, completion)
                    bar.update()
            bar.update(0)  # the clock goes on
            check_interrupt()
    seconds, stats = time.perf_counter() - start, engine.stats
    _say(
        f"{stats.generated_tokens} tokens in {seconds:.1f} s, {stats.generated_tokens / seconds:.1f} tokens/s, "
        f"compilation included; {given} tokens of prompts, {stats.computed_tokens} of them computed: sharing factor "
        f"{given / stats.computed_tokens:.1f}"
    )
    if stats.saturated:
        _say(
            f"warning: {stats.saturated:,} numbers of K and V were too large for their scales, and were cut; "
            "--kv-dtype fp8-by-token has scales for each token, and without the option nothing is cut"
        )


if __name__ == "__main__":
    main()
