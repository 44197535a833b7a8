"""What an engine has done, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from codec_jax.nnx.scheduler import Scheduler


@dataclass(frozen=True)
class Stats:
    """Counts since the engine was made, and what there is now."""

    submitted: int
    finished: int
    preempted: int  # requests that had to leave, to be computed again
    steps: int
    prompt_tokens: int  # of requests that entered, but for the last one of each, which is fed to draw by
    cached_tokens: int  # of those, found in the cache
    computed_tokens: int  # computed ahead of a first drawn one, each once, whoever shares it; the last ones as well
    generated_tokens: int
    waiting: int
    running: int
    free_pages: int
    cached_pages: int  # of prefixes that nobody reads now
    reconstructed_pages: int  # that have K and V beside their latents
    saturated: int  # numbers that were too large for their scale, of pages of one byte here; each copy of one counts


def count(
    scheduler: Scheduler, submitted: int, steps: int, generated_tokens: int, reconstructed_pages: int, saturated: int
) -> Stats:
    """Count what a scheduler has done and has now, beside what the engine says of itself."""
    waiting = sum(not request.finished for request in scheduler.queue)
    running = len(scheduler.inside)
    return Stats(
        submitted=submitted,
        finished=submitted - waiting - running,
        preempted=scheduler.preempted,
        steps=steps,
        prompt_tokens=scheduler.prompt_tokens,
        cached_tokens=scheduler.cached_tokens,
        computed_tokens=scheduler.computed_tokens,
        generated_tokens=generated_tokens,
        waiting=waiting,
        running=running,
        free_pages=scheduler.cache.pool.num_free,
        cached_pages=scheduler.cache.num_cached,
        reconstructed_pages=reconstructed_pages,
        saturated=saturated,
    )
