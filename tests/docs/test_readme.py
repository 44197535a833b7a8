"""The first page: its program runs, prints what is shown and is right, and its commands and links lead somewhere."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import jax
import numpy as np

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_quickstart_prints_what_it_shows_and_agrees_with_dense_attention() -> None:
    code, shown = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.DOTALL).groups()
    names: dict[str, Any] = {}
    said = io.StringIO()
    with redirect_stdout(said):
        exec(code, names)
    assert said.getvalue() == shown
    key, value = (names[name].reshape(-1, 2, 64) for name in ("key_pages", "value_pages"))
    for request in range(3):
        slots = names["forest"].context_slots(request)
        expected = jax.nn.dot_product_attention(names["query"][request], key[slots], value[slots])
        np.testing.assert_allclose(names["out"][request], expected, atol=1e-5)


def test_the_page_is_short_and_its_files_exist() -> None:
    assert len(README.splitlines()) <= 160
    links = re.findall(r"\]\((?!https:)([^)#]+)\)", README)
    commands = re.findall(r"\.venv/bin/python (\S+\.py)", README)
    assert len(links) > 10
    assert len(commands) == 1
    assert [path for path in [*links, *commands] if not (ROOT / path).exists()] == []


def test_it_names_no_image_that_shows_only_where_files_lie_beside_it() -> None:
    assert [mark for mark in ("![", "<img") if mark in README] == []
