"""Time vLLM's decode steps with requests over one document, those of benchmarks.decoding; where vLLM is installed.

    python -m benchmarks.vllm_decoding --model Qwen3-4B --json rows.json
    python -m benchmarks.vllm_decoding --model Qwen3-4B --cascade --json rows.json
    python -m benchmarks.vllm_decoding --model Qwen3-4B --profile --json rows.json

`--model` is a folder with the model's config.json: weights are random, as there. The document is in the prefix cache,
and a step is what passes between two tokens of every request, all of them decoding and greedy. vLLM keeps its defaults.
With `--cascade` it attends to what all requests share once, in the older of its two runners, which alone can, and
whether or not its own rule expects a gain: that rule says no for few requests, also where there is one.
With `--profile` rows have the kernels of a step, too, by PyTorch's profiler; vLLM then shares the process of this
command, which takes it longer where its steps are not CUDA graphs.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.arguments import how_many
from benchmarks.drafts import draft_of, write_rows
from benchmarks.step_parts import parts_of
from benchmarks.vllm_engine import parser_of, provenance, start, vocab_size

_OWN = 128  # tokens of each request, as in benchmarks.decoding
_ROUNDS, _TOKENS = 5, 32
_SETTLE = 4  # steps after which all requests decode, and none is left of those that computed prompts
_PROFILED = 8
_LEAST_SHARED = 256  # tokens that vLLM's cascade takes at least

_ids = itertools.count()


def main() -> None:
    """Measure and write the rows."""
    parser = parser_of(__doc__)
    parser.add_argument("--documents", type=how_many, nargs="+", default=[1024, 32_768, 120_000])
    parser.add_argument("--requests", type=how_many, nargs="+", default=[16, 64])
    parser.add_argument("--cascade", action="store_true", help="attend to what all requests share once")
    parser.add_argument("--profile", action="store_true", help="kernels, too, in one process")
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    vocab = vocab_size(parser, arguments)
    if max(arguments.requests) > arguments.max_requests:
        parser.error(
            f"requests: expected at most {arguments.max_requests}, the --max-requests, got {arguments.requests}"
        )
    with cascading() if arguments.cascade else nullcontext():
        engine = start(arguments, max(arguments.documents) + _OWN + _TOKENS, arguments.cascade, not arguments.profile)
        common = {"model": arguments.model.name.lower(), "variant": "vLLM, cascade" if arguments.cascade else "vLLM"}
        common["process"] = "the command's" if arguments.profile else "its own"
        common |= provenance()
        draft, rows = draft_of(arguments.json), []
        for document in arguments.documents:
            tokens = rng.integers(vocab, size=document).tolist()
            for requests in arguments.requests:
                row = {"name": f"{requests} over {document}", "document_tokens": document, "requests": requests}
                rows.append(row | measure(engine, tokens, requests, vocab, rng, arguments.profile) | common)
                print(rows[-1]["name"], rows[-1]["variant"], f"{rows[-1]['wall_us']:.0f} μs", flush=True)
                write_rows(draft, rows)
    draft.replace(arguments.json)


def cascading() -> Any:
    """Return what makes vLLM share wherever it can: a patch of the rule by which its FlashAttention backend decides."""
    from vllm.v1.attention.backends import flash_attn

    def shares(common_prefix_len: int, **_: Any) -> bool:
        return common_prefix_len >= _LEAST_SHARED

    return patch.object(flash_attn, "use_cascade_attention", shares)


def measure(
    engine: Any, document: list[int], requests: int, vocab: int, rng: np.random.Generator, profile: bool
) -> dict:
    """Return microseconds of a step, those of the fastest round, and of its kernels by part.

    A round's is the mean over its steps, since tokens of two of them may come at once. Where the host launches every
    kernel, rounds differ by a third, so vLLM's best is taken.

    Raises RuntimeError where the document was not in the cache.
    """
    core = engine.llm_engine

    def prompts() -> list[list[int]]:
        return [document + each for each in rng.integers(vocab, size=(requests, _OWN)).tolist()]

    for first in (prompts()[:1], prompts()):  # the document comes into the cache, then kernels are compiled
        for _ in full_steps(core, first, 2 * _SETTLE):
            pass
    rounds = []
    for _ in range(_ROUNDS):
        times = []
        for outputs in full_steps(core, prompts(), _TOKENS):
            times.append(time.perf_counter())
            if (cached := min(each.num_cached_tokens for each in outputs)) < len(document) // 64 * 64:
                raise RuntimeError(f"cached tokens: expected the document, {len(document)}, got {cached}")
        rounds.append(np.diff(times[_SETTLE:-1]).mean())
    return {"wall_us": 1e6 * min(rounds)} | (kernels(core, prompts()) if profile else {})


def full_steps(core: Any, prompts: list[list[int]], tokens: int) -> Iterator[list]:
    """Generate tokens of prompts, and yield the outputs of each step that has one of every request.

    Raises RuntimeError if there are too few of them: requests then did not decode together.
    """
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    for prompt in prompts:
        core.add_request(str(next(_ids)), {"prompt_token_ids": prompt}, params)
    full = 0
    while core.has_unfinished_requests():
        if len(outputs := core.step()) == len(prompts):
            full += 1
            yield outputs
    if full < tokens - _SETTLE:
        raise RuntimeError(f"steps: expected {tokens} with a token of all {len(prompts)} requests, got {full}")


def kernels(core: Any, prompts: list[list[int]]) -> dict[str, float]:
    """Return what the kernels of a step take, and those of each part, by PyTorch's profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    profiler = profile(activities=[ProfilerActivity.CUDA])
    for step, _ in enumerate(full_steps(core, prompts, _SETTLE + _PROFILED + _SETTLE)):
        torch.cuda.synchronize()  # the next step may be under way, at the end as at the start
        if step == _SETTLE:
            profiler.start()
        elif step == _SETTLE + _PROFILED:
            profiler.stop()
    found = [(each.key, each.device_time_total / _PROFILED) for each in profiler.key_averages()]
    return parts_of(each for each in found if each[1])


if __name__ == "__main__":
    main()
