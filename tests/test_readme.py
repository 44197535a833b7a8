import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.rounding import at_least, at_most

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_quickstart_runs_and_agrees_with_dense_attention():
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 12
    names = {}
    exec(code, names)
    key, value = (names[name].reshape(-1, 2, 64) for name in ("key_pages", "value_pages"))
    for request in range(3):
        slots = names["forest"].context_slots(request)
        expected = jax.nn.dot_product_attention(names["query"][request], key[slots], value[slots])
        np.testing.assert_allclose(names["out"][request], expected, atol=1e-5)


def test_sharing_in_the_quickstart_stores_the_document_once():
    names = {}
    exec(re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1).split("plan =")[0], names)
    assert jnp.sum(names["forest"].length) == 1000 + 2 + 1 + 3


def test_the_passage_on_draft_trees_runs_and_ends_with_the_accepted_tokens():
    names = {}
    exec(re.search(r"## Draft trees\n.*?```python\n(.*?)```", README, re.DOTALL).group(1), names)
    assert names["out"].shape == names["query"].shape
    assert names["tokens"].tolist() == [[5, 6, 8, 7], [5, 6, 7, 8]]
    assert names["rotary"].tolist() == [[101, 102, 103, 102], [101, 101, 102, 102]]
    assert names["forest"].request_length.tolist() == [103, 102]
    own = np.concatenate([names["forest"].context_slots(request)[101:] for request in range(2)])
    target = np.asarray(names["target"]).reshape(-1)
    assert target[target < 64 * 16].tolist() == own.tolist()


def test_the_decode_step_of_the_first_page_is_that_of_its_result_file():
    rows = json.loads((ROOT / "benchmarks/results/decoding_120000_h200.json").read_text())["rows"]
    ms = {row["variant"]: row["wall_us"] / 1e3 for row in rows if row["requests"] == 64 and row.get("wall_us")}
    assert (
        f"64 requests that continue a document of 120,000 tokens get a token each in {at_most(ms['shared'], 1)} ms"
        in README
    )
    assert f"by the same kernels, it takes {at_least(ms['unshared'], 1)} ms" in README


def test_the_numbers_of_the_tree_of_thoughts_are_those_of_its_result_file():
    figures = json.loads((ROOT / "benchmarks/results/tree_of_thoughts.json").read_text())
    rows = [
        f"| {figures['total']} held-out puzzles | solved | generated tokens | KV tokens read "
        "| KV tokens without sharing |",
        f"| tree of thoughts | {figures['solved']} | {figures['generated_tokens']:,} "
        f"| {figures['kv_tokens_read']:,} | {figures['kv_tokens_unshared']:,} |",
        f"| independent attempts | {figures['baseline_solved']} | {figures['baseline_generated_tokens']:,} | | |",
    ]
    assert [row for row in rows if row not in README] == []
