"""Intervals that are planned while the device decodes."""

from typing import NamedTuple

import chex
import jax
import pytest
from cases import PROMPTS, STEPS, Dense, stops_for

from codec_jax.nnx import Sampler
from codec_jax.nnx.intervals import Interval


class Prepared(NamedTuple):
    """What `watched` saw: the intervals that were planned, and which of them were decoded with."""

    planned: list[Interval]
    decoded: list[Interval]


@pytest.fixture
def watched(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> Prepared:
    seen, prepare, decode = Prepared([], []), sampler._intervals.prepare, sampler._device.decode_program(sampler.steps)

    def note(*args):
        seen.planned.append(prepare(*args))
        return seen.planned[-1]

    def run(weights, cache, logits, growers, plan, *rest):
        seen.decoded.append(next(each for each in seen.planned if each.plan is plan))
        return decode(weights, cache, logits, growers, plan, *rest)

    monkeypatch.setattr(sampler._intervals, "prepare", note)
    monkeypatch.setattr(sampler._device, "decode_program", lambda _: run)
    return seen


def test_while_nobody_stops_each_interval_is_planned_once_and_before_the_last_is_fetched(
    sampler: Sampler, dense: Dense, watched: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, planned_before_fetch = jax.device_get, []
    monkeypatch.setattr(jax, "device_get", lambda x: planned_before_fetch.append(len(watched.planned)) or fetch(x))
    _, generated = sampler.decode(sampler.start(PROMPTS), 3 * STEPS + 2, temperature=0.0)
    assert planned_before_fetch == [2, 3, 4, 4]
    assert [id(each) for each in watched.decoded] == [id(each) for each in watched.planned]
    assert generated.tokens[: len(PROMPTS)] == [dense.greedy(prompt, 3 * STEPS + 2) for prompt in PROMPTS]


def test_plans_made_ahead_are_dropped_when_somebody_stops_and_change_nothing(
    sampler: Sampler, dense: Dense, watched: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops = stops_for([dense.greedy(prompt, 30) for prompt in PROMPTS])
    state, ahead = sampler.decode(sampler.start(PROMPTS), 30, seed=5, stop_tokens=stops)
    assert len(watched.decoded) < len(watched.planned)
    with monkeypatch.context() as patch:
        patch.setattr(sampler._intervals, "prepare_ahead", lambda *_: None)
        other, alone = sampler.decode(sampler.start(PROMPTS), 30, seed=5, stop_tokens=stops)
    assert ahead.tokens == alone.tokens
    chex.assert_trees_all_equal((state.forest, state.logits), (other.forest, other.logits))
