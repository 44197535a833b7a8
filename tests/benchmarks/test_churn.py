"""The benchmark that watches memory under churn, on a few requests; what a leak looks like."""

import jax.numpy as jnp
import pytest

from benchmarks import churn, tables
from benchmarks.churn import ENGINE, TINY, Churn, leaked_pages, rss_bytes, sample
from codec_jax.nnx import random_decoder
from codec_jax.nnx.engine import Engine
from codec_jax.nnx.params import SamplingParams

pytestmark = pytest.mark.usefixtures("_others_set_aside")


@pytest.fixture(scope="module", autouse=True)
def _few_rows() -> None:
    """Few chunks and rows, which compile faster."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(ENGINE, "max_requests", 4)
        monkeypatch.setitem(ENGINE, "prefill_tokens", 128)
        monkeypatch.setitem(ENGINE, "num_pages", 40)
        yield


def test_all_requests_are_sent_and_a_row_says_what_stays_behind() -> None:
    (row,) = churn.measure_all(160, sampled_every=40)
    assert [each["requests"] for each in row["samples"]] == [40, 80, 120, 160]
    assert min(row["aborted"], row["forked"], row["generated_tokens"]) > 0
    assert 0.0 < row["cached_share"] < 1.0
    assert row["leaked_pages"] == 0
    assert row["max_rss_bytes"] >= max(row["first_rss_bytes"], row["last_rss_bytes"]) > 2**20
    assert len({(each["live_arrays"], each["live_array_bytes"]) for each in row["samples"]}) == 1
    (line,) = tables.churn([row]).split("\n")[2:]
    assert line.startswith("| 160 requests, tiny model |")
    assert line.endswith(" | 0 |")


def test_a_run_is_the_same_again_and_ends_idle() -> None:
    def run() -> tuple[int, ...]:
        engine = Engine(random_decoder(TINY), **ENGINE)
        sender = Churn(engine)
        sender.run(30)
        sender.run(30)
        assert engine.idle
        assert engine.stats.submitted == engine.stats.finished == sender.sent == 60
        return sender.aborted, sender.forked, sender.tokens, engine.stats.prompt_tokens

    assert run() == run()


def test_what_stays_behind_is_seen() -> None:
    engine = Engine(random_decoder(TINY), **ENGINE)
    before = sample(engine)
    assert before["leaked_pages"] == 0
    kept = jnp.zeros(1000, jnp.float32) + 1
    after = sample(engine)
    assert after["live_array_bytes"] - before["live_array_bytes"] >= kept.nbytes
    engine.submit(list(range(20)), SamplingParams(max_tokens=30))
    engine.step()
    assert leaked_pages(engine) >= 3  # somebody still reads them
    assert rss_bytes() > 2**20


@pytest.mark.parametrize("requests", ["0", "-1", "many"])
def test_no_requests_are_refused(requests: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["churn", "--json", "rows.json", f"--requests={requests}"])
    with pytest.raises(SystemExit):
        churn.main()
    assert f"argument --requests: expected a positive whole number, got {requests!r}" in capsys.readouterr().err
