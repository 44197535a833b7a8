"""Time vLLM under the loads of benchmarks.serving, all requests at once; in an environment that has vLLM.

    python -m benchmarks.vllm_serving --model Qwen3-4B --workload questions --json rows.json

Prompts and numbers of tokens are those that the engine gets, and so is how many requests may be inside. `--model` is a
folder with the model's config.json: weights are random, as there. vLLM keeps its own defaults but for that: its prefix
cache and CUDA graphs are on, and it fills 0.9 of the GPU's memory. What it compiles and captures is done before.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.loads import add_arguments, cases
from benchmarks.offered import Offered, percentiles, throughput

_WARM_UP_TOKENS, _WARM_UP_NEW_TOKENS = 4000, 20


def main() -> None:
    """Measure and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="file for the rows")
    parser.add_argument("--model", type=Path, required=True, help="folder with a config.json")
    parser.add_argument("--max-requests", type=int, default=64)
    parser.add_argument("--prefill-tokens", type=int, default=8192, help="tokens of a batch")
    add_arguments(parser)
    parser.set_defaults(speed=math.inf)
    arguments = parser.parse_args()
    if math.isfinite(arguments.speed):
        parser.error(f"speed: expected inf, since vLLM gets all requests at once, got {arguments.speed:g}")
    if importlib.util.find_spec("vllm") is None:
        parser.error("vllm: expected a package of this environment, got none; install vLLM in one of its own")
    vocab_size = json.loads((arguments.model / "config.json").read_text())["vocab_size"]
    loads = {case.name: case.load(vocab_size) for case in cases(arguments)}
    longest = max(len(each.prompt) + each.new_tokens for load in loads.values() for each in load)
    engine = start(arguments, longest)
    replay(engine, [Offered(0.0, np.arange(_WARM_UP_TOKENS), _WARM_UP_NEW_TOKENS)] * arguments.max_requests)
    common = {"workload": arguments.workload, "model": arguments.model.name, "variant": "vLLM"} | provenance()
    common["engine"] = {name: getattr(arguments, name) for name in ("max_requests", "prefill_tokens")}
    rows = [{"name": name} | replay(engine, load) | common for name, load in loads.items()]
    arguments.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    for row in rows:
        print(f"{row['name']}: {row['seconds']:.2f} s, {row['output_tokens_per_second']:.0f} tokens/s")


def start(arguments: argparse.Namespace, longest: int) -> Any:
    """Start vLLM in this process; it reads its settings from the environment when it is imported."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    from vllm import LLM

    return LLM(
        model=str(arguments.model),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=longest + 1,
        max_num_seqs=arguments.max_requests,
        max_num_batched_tokens=arguments.prefill_tokens,
        enable_prefix_caching=True,
        disable_log_stats=False,
        gpu_memory_utilization=0.9,
        seed=0,
    )


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


def provenance() -> dict:
    """Return device, versions and date."""
    import torch

    versions = {name: importlib.metadata.version(name) for name in ("vllm", "torch")}
    return {
        "device": torch.cuda.get_device_name(),
        "versions": {"python": platform.python_version()} | versions,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


if __name__ == "__main__":
    main()
