"""The loads that benchmarks.serving and benchmarks.vllm_serving take, by the same arguments."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.arguments import how_many, speed
from benchmarks.offered import TRACE, Offered, questions, rollouts, trace

WORKLOADS = ("trace", "rollouts", "questions")


class Case(NamedTuple):
    """Load with a name."""

    name: str
    load: Callable[[int], list[Offered]]  # by the size of the vocabulary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what says which load it is."""
    parser.add_argument("--workload", choices=WORKLOADS, default="trace")
    parser.add_argument("--trace", type=Path, default=TRACE, help="a file in Mooncake's format")
    parser.add_argument("--requests", type=how_many, default=1000, help="of the trace, from its beginning")
    parser.add_argument("--speed", type=speed, default=20.0, help="of the trace's clock; inf: all at once")
    parser.add_argument("--prompts", type=how_many, default=64, help="of rollouts")
    parser.add_argument("--samples", type=how_many, default=16, help="of each prompt")
    parser.add_argument("--prompt-tokens", type=how_many, nargs="+", default=[1024, 8192, 32_768], help="a case each")
    parser.add_argument("--questions", type=how_many, default=256)
    parser.add_argument("--question-tokens", type=how_many, default=64)
    parser.add_argument("--documents", type=how_many, default=4, help="that the questions are about")
    parser.add_argument("--document-tokens", type=how_many, default=32_768)
    parser.add_argument("--new-tokens", type=how_many, help="of each sample (default: 512) or answer (default: 128)")


def parse_load(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the arguments of a command; ends it where a trace has fewer requests than are asked for."""
    arguments = parser.parse_args()
    if arguments.workload == "trace":
        with arguments.trace.open() as lines:
            there = sum(1 for _ in lines)
        if arguments.requests > there:
            parser.error(f"--requests: expected at most the {there} of the trace, got {arguments.requests}")
    return arguments


def cases(arguments: argparse.Namespace) -> list[Case]:
    """Return the cases of a workload."""
    if arguments.workload == "trace":
        speed = f"{arguments.speed:g} times as fast" if math.isfinite(arguments.speed) else "all at once"
        load = partial(trace, arguments.trace, arguments.requests, arguments.speed)
        return [Case(f"{arguments.requests} requests of a trace, {speed}", load)]
    if arguments.workload == "questions":
        documents, tokens = arguments.documents, arguments.document_tokens
        load = partial(
            questions, arguments.questions, documents, tokens, arguments.question_tokens, arguments.new_tokens or 128
        )
        return [Case(f"{arguments.questions} questions, {documents} documents of {tokens}", load)]
    prompts, samples, new_tokens = arguments.prompts, arguments.samples, arguments.new_tokens or 512
    return [
        Case(
            f"{prompts} prompts of {tokens}, {samples} samples", partial(rollouts, prompts, samples, tokens, new_tokens)
        )
        for tokens in arguments.prompt_tokens
    ]
