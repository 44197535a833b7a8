"""Send an engine requests that share, fork and are left, and watch what stays behind.

    python -m benchmarks.churn --json benchmarks/results/churn_cpu.json [--requests 200000]

A tiny model on whatever device there is: the forest, the queue and the steps are what is exercised. After every 5,000
requests the engine is let run dry, and a sample is taken of the process's memory, the arrays of JAX, the objects of
Python, and the pages that nobody can get any more. Memory settles while caches and the allocator's pools fill: the
first tenth is warm-up.
"""

from __future__ import annotations

import gc
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from benchmarks.planning import processor
from benchmarks.report import conclude
from benchmarks.rows import collect, provenance
from benchmarks.timing import command
from codec_jax.command_line import count_parser
from codec_jax.nnx import DecoderConfig, random_decoder
from codec_jax.nnx.engine import Engine
from codec_jax.nnx.params import SamplingParams
from codec_jax.nnx.request import Request

TINY = DecoderConfig(
    64, 16, 16, num_layers=1, num_q_heads=2, num_kv_heads=1, head_dim=16, dtype=jnp.float32, param_dtype=jnp.float32
)
#: Pages are short: prefixes are evicted all the time, and a few in a hundred requests have to give way.
ENGINE = {"max_requests": 64, "num_pages": 160, "page_size": 8, "max_context": 128, "prefill_tokens": 1024, "room": 0.0}

SAMPLED_EVERY, WARM_UP_SHARE = 5000, 0.1
OUTSTANDING = 128  # requests that have not finished
DOCUMENTS, NEW_DOCUMENT = 16, 0.01  # that prompts begin with; how often a prompt brings a new one
ABORTED, FORKED = 0.05, 0.05  # of the requests


class Churn:
    """Keeps an engine busy with random requests; the same seed sends the same ones."""

    def __init__(self, engine: Engine, seed: int = 0) -> None:
        """Draw the first documents."""
        self.engine, self._rng = engine, np.random.default_rng(seed)
        self.sent = self.aborted = self.forked = self.tokens = 0
        self._live: list[Request] = []
        self._finished: deque[Request] = deque(maxlen=64)  # that may still be forked
        self._documents = [self._draw(64) for _ in range(DOCUMENTS)]

    def run(self, requests: int) -> None:
        """Send so many more requests, and work until all are finished."""
        end = self.sent + requests
        while self.sent < end or not self.engine.idle:
            while self.sent < end and len(self._live) < OUTSTANDING:
                self._live.append(self._send())
            self.engine.step()
            for request in self._live:
                if request.finished:
                    self._finished.append(request)
                    self.tokens += len(request.tokens)
            self._live = [request for request in self._live if not request.finished]
        self.engine.step()  # those that have finished leave

    def _send(self) -> Request:
        """Submit a request or fork one, and sometimes abort another."""
        self.sent += 1
        event = self._rng.random()
        if event < ABORTED and self._live:
            self.engine.abort(self._live[self._rng.integers(len(self._live))])
            self.aborted += 1
        params = SamplingParams(max_tokens=int(self._rng.integers(1, 17)), seed=self.sent)
        if event > 1 - FORKED and (source := self._source(params.max_tokens)) is not None:
            self.forked += 1
            return self.engine.fork(source, params)
        if self._rng.random() < NEW_DOCUMENT:
            self._documents[self._rng.integers(DOCUMENTS)] = self._draw(64)
        document = self._documents[self._rng.integers(DOCUMENTS)]
        own = self._draw(int(self._rng.integers(1, 25)))
        return self.engine.submit(np.concatenate([document[: self._rng.integers(0, 65)], own]), params)

    def _source(self, max_tokens: int) -> Request | None:
        """Return a request that has generated less than so many tokens, finished or not."""
        among = [request for request in (*self._live, *self._finished) if len(request.tokens) < max_tokens]
        return among[self._rng.integers(len(among))] if among else None

    def _draw(self, tokens: int) -> np.ndarray:
        return self._rng.integers(0, TINY.vocab_size, tokens)


def main() -> None:
    """Send the requests and write the row."""
    parser = command(__doc__)
    parser.add_argument("--requests", type=count_parser(), default=200_000)
    arguments = parser.parse_args()
    conclude("churn", collect(measure_all(arguments.requests), arguments.json), arguments.json)


def measure_all(requests: int, sampled_every: int = SAMPLED_EVERY) -> Iterator[dict]:
    """Yield the row of a run."""
    engine = Engine(random_decoder(TINY), **ENGINE)
    engine.warm_up()
    churn, samples, start = Churn(engine), [], time.perf_counter()
    for _ in tqdm(range(0, requests, sampled_every)):
        churn.run(min(sampled_every, requests - churn.sent))
        samples.append({"requests": churn.sent} | sample(engine))
        tqdm.write("  ".join(f"{field} {value:,}" for field, value in samples[-1].items()))
    settled = samples[int(WARM_UP_SHARE * len(samples)) :]
    rss = [each["rss_bytes"] for each in settled]
    yield {
        "name": f"{requests:,} requests, tiny model",
        "requests": requests,
        "aborted": churn.aborted,
        "forked": churn.forked,
        "preempted": engine.stats.preempted,
        "generated_tokens": churn.tokens,
        "cached_share": engine.stats.cached_tokens / engine.stats.prompt_tokens,
        "seconds": time.perf_counter() - start,
        "warm_up_requests": settled[0]["requests"],
        "first_rss_bytes": rss[0],
        "last_rss_bytes": rss[-1],
        "max_rss_bytes": max(rss),
        "leaked_pages": max(each["leaked_pages"] for each in samples),
        "samples": samples,
        "engine": ENGINE,
        **provenance("numpy", "flax"),
        "device": processor(),
    }


def sample(engine: Engine) -> dict:
    """Count what there is while an engine is idle."""
    gc.collect()
    arrays = jax.live_arrays()
    return {
        "rss_bytes": rss_bytes(),
        "live_arrays": len(arrays),
        "live_array_bytes": sum(array.nbytes for array in arrays),
        "objects": len(gc.get_objects()),
        "leaked_pages": leaked_pages(engine),
    }


def leaked_pages(engine: Engine) -> int:
    """Count the pages of an idle engine that would not be free if it forgot everything that nobody reads."""
    pool = engine._scheduler.cache.drop().pool
    return pool.num_pages - pool.num_free


def rss_bytes() -> int:
    """Return the memory of this process that is resident, as Linux counts it."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
