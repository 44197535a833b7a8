"""Time vLLM under the loads of benchmarks.serving, all requests at once; in an environment that has vLLM.

    python -m benchmarks.vllm_serving --model Qwen3-4B --workload questions --json rows.json

Prompts and numbers of tokens are those that the engine gets, and so is how many requests may be inside. `--model` is a
folder with the model's config.json: weights are random, as there. vLLM keeps its own defaults but for that: its prefix
cache and CUDA graphs are on, and it fills 0.9 of the GPU's memory. What it compiles and captures is done before.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from benchmarks.drafts import write_rows
from benchmarks.loads import add_arguments, cases, parse_load
from benchmarks.offered import Offered, percentiles, throughput
from benchmarks.vllm_engine import parser_of, provenance, start, vocab_size

_WARM_UP_TOKENS, _WARM_UP_NEW_TOKENS = 4000, 20


def main() -> None:
    """Measure and write the rows."""
    parser = parser_of(__doc__)
    add_arguments(parser)
    parser.set_defaults(speed=math.inf)
    arguments = parse_load(parser)
    if math.isfinite(arguments.speed):
        parser.error(f"speed: expected inf, since vLLM gets all requests at once, got {arguments.speed:g}")
    vocab = vocab_size(parser, arguments)
    loads = {case.name: case.load(vocab) for case in cases(arguments)}
    longest = max(len(each.prompt) + each.new_tokens for load in loads.values() for each in load)
    engine = start(arguments, longest)
    replay(engine, [Offered(0.0, np.arange(_WARM_UP_TOKENS), _WARM_UP_NEW_TOKENS)] * arguments.max_requests)
    common = {"workload": arguments.workload, "model": arguments.model.name, "variant": "vLLM"} | provenance()
    common["engine"] = {name: getattr(arguments, name) for name in ("max_requests", "prefill_tokens")}
    rows = [{"name": name} | replay(engine, load) | common for name, load in loads.items()]
    write_rows(arguments.json, rows)
    for row in rows:
        print(f"{row['name']}: {row['seconds']:.2f} s, {row['output_tokens_per_second']:.0f} tokens/s")


def replay(engine: Any, offered: list[Offered]) -> dict:
    """Offer a load all at once; returns what a row says of it.

    Raises RuntimeError unless every request gets all its tokens.
    """
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": each.prompt.tolist()} for each in offered]
    params = [
        SamplingParams(temperature=1.0, max_tokens=each.new_tokens, ignore_eos=True, detokenize=False)
        for each in offered
    ]
    begin = time.perf_counter()
    outputs = engine.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    got = [len(output.outputs[0].token_ids) for output in outputs]
    if got != [each.new_tokens for each in offered]:
        raise RuntimeError(f"requests: expected {sum(each.new_tokens for each in offered)} tokens, got {sum(got)}")
    row = throughput(offered, sum(got), seconds)
    return row | {
        **percentiles("first_token", np.asarray([output.metrics.first_token_latency for output in outputs])),
        "hit_rate": sum(output.num_cached_tokens or 0 for output in outputs) / row["prompt_tokens"],
    }


if __name__ == "__main__":
    main()
