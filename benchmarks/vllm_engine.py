"""vLLM as a peer: started in this process with random weights, in an environment that has it."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
from pathlib import Path
from typing import Any

from benchmarks.arguments import how_many, rows_file


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a command that measures vLLM."""
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=doc)
    parser.add_argument("--json", type=rows_file, required=True, help="file for the rows")
    parser.add_argument("--model", type=Path, required=True, help="folder with a config.json")
    parser.add_argument("--max-requests", type=how_many, default=64)
    parser.add_argument("--prefill-tokens", type=how_many, default=8192, help="tokens of a batch")
    return parser


def vocab_size(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Return the vocabulary of the model; ends the command where there is no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        parser.error("vllm: expected a package of this environment, got none; install vLLM in one of its own")
    return json.loads((arguments.model / "config.json").read_text())["vocab_size"]


def start(arguments: argparse.Namespace, longest: int, cascade: bool = False, own_process: bool = False) -> Any:
    """Start vLLM; it reads its settings from the environment when it is imported.

    Contexts have `longest` tokens at most. Its cascade needs the older of its two runners. A process of its own is what
    vLLM has by default; the process is forked, so that what was patched here is patched there.
    """
    processes = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(own_process)), "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    os.environ |= processes | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if cascade:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
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
        **({"disable_cascade_attn": False} if cascade else {}),
    )


def provenance() -> dict:
    """Return device, versions and date."""
    import torch

    versions = {name: importlib.metadata.version(name) for name in ("vllm", "torch")}
    return {
        "device": torch.cuda.get_device_name(),
        "versions": {"python": platform.python_version()} | versions,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
