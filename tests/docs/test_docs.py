"""The documentation: its programs run and print what it shows, and so do the examples of docstrings."""

import doctest
import importlib
import importlib.util
import inspect
import io
import pkgutil
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import is_dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import write_checkpoint

import codec_jax
import pallas_kernels
from codec_jax import flash_decoding, generate
from codec_jax import partial as partials

DOCS = Path(__file__).parents[2] / "docs"
TUTORIAL, *HOW_TO = DOCS / "tutorial.md", *sorted((DOCS / "how_to").glob("*.md"))
REFERENCE = DOCS / "reference" / "index.md"
BLOCK = re.compile(r"```(python|sh)\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)

MODULES = [
    importlib.import_module(module.name)
    for package in (codec_jax, pallas_kernels)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
]
#: Every public name is in `__all__` of one of these.
FACES = (codec_jax, codec_jax.attention, partials, flash_decoding, codec_jax.latent, codec_jax.nnx, pallas_kernels)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
#: Public callables without an example of their own, and why.
WITHOUT_EXAMPLE = {
    "LogitsError.of": "the sampler makes it, for weights that are not finite",
    "Generated.none": "Sampler.decode begins with it",
    "Attention.decode": "Decoder.decode calls it, with arguments of the same names",
    "MultiHeadLatentAttention.decode": "Decoder.decode calls it, with arguments of the same names",
    "MultiHeadLatentAttention.reconstruct": "the sampler and the engine call it",
    "Following": "AsyncEngine.submit makes it",
    "AsyncEngine.check": "it says whether calls are taken, for a server's answer to that",
    "Following.abort": "leaving `async with` calls it, as in the example of AsyncEngine",
    "Matcher.compute_bitmask": "the engine calls it",
    "Matcher.consume_token": "the engine calls it",
    "Matcher.is_stopped": "the engine calls it",
    "Matcher.deep_copy": "the engine calls it",
}


@pytest.fixture(autouse=True)
def _as_a_reader_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """JAX's own settings, no plans from before, and a folder with a small checkpoint in the place of a large one."""
    (tmp_path / "Qwen3-4B").mkdir()
    sizes = {"vocab_size": 40, "stop": 5, "max_context": 8192, "deviation": 1.0, "seed": 0}
    write_checkpoint(tmp_path / "Qwen3-4B", "qwen3", **sizes)
    monkeypatch.chdir(tmp_path)
    flash_decoding.plans.clear()
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


# ---------------------------------------------------------------------- pages


def run(page: Path) -> dict[str, Any]:
    """Run a page as one program; each block prints what the page shows below it."""
    names: dict[str, Any] = {}
    for language, code, shown in BLOCK.findall(page.read_text()):
        if language == "sh":
            command = shlex.split(code.replace("\\\n", " "))
            if command[:3] == ["python", "-m", "codec_jax.generate"]:
                generate.main(command[3:])
            continue
        if code.startswith("import torch\n") and importlib.util.find_spec("torch") is None:
            continue
        said = io.StringIO()
        with redirect_stdout(said):
            exec(compile(code, page.name, "exec"), names)
        assert said.getvalue() == shown
    return names


@pytest.mark.parametrize("page", HOW_TO, ids=lambda page: page.stem)
def test_pages_print_what_they_show(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= 120
    run(page)


def test_the_tutorial_decodes_in_60_lines_what_dense_attention_says() -> None:
    blocks = BLOCK.findall(TUTORIAL.read_text())
    assert sum(bool(line.strip()) for _, code, _ in blocks for line in code.splitlines()) <= 60
    names = run(TUTORIAL)

    def dense(i: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(query, key, value, is_causal=True)

    @jax.jit
    def logits_of(tokens: jax.Array) -> jax.Array:
        return names["model"](names["weights"], tokens[None], jnp.arange(len(tokens))[None], dense)[0]

    def following(context: list[int], count: int) -> list[int]:
        """Return the most likely tokens after a context, each from all tokens before it."""
        text = list(context)
        for _ in range(count):
            padded = np.pad(np.asarray(text), (0, 256 - len(text)))  # nobody sees what comes later
            text.append(int(logits_of(padded)[len(text) - 1].argmax()))
        return text[len(context) :]

    # Each row begins with the token that comes last in the one before, and that is not in the context yet.
    document, first, second = (prompt.tolist() for prompt in names["prompts"])
    prompts = [following(context, 5) for context in (first, second)]
    first, second = first + prompts[0][:-1], second + prompts[1][:-1]
    unlikely = int(logits_of(np.pad(first, (0, 256 - len(first))))[len(first) - 1].argsort()[-2])
    forks = [following(first, 5), following(second, 5), [unlikely, *following([*first, unlikely], 4)]]
    second, twin = second + forks[1][:-1], first + forks[2][:-1]
    arrivals = [following(context, 5) for context in (document + names["questions"][2].tolist(), second, twin)]

    shown = [re.findall(r"\[([\d ]+)\]", text) for _, code, text in blocks if "= decode(" in code]
    assert [[list(map(int, row.split())) for row in rows] for rows in shown] == [prompts, forks, arrivals]


# ---------------------------------------------------------------------- docstrings


def names_of_examples() -> dict[str, Any]:
    """Return what the reference says that examples begin with."""
    [code] = re.findall(r"```python\n(.*?)```", REFERENCE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    return names


@pytest.mark.parametrize("module", [m for m in MODULES if ">>> " in inspect.getsource(m)], ids=lambda m: m.__name__)
def test_examples_of_docstrings_print_what_they_show(module: ModuleType) -> None:
    finder, runner = doctest.DocTestFinder(exclude_empty=True), doctest.DocTestRunner(optionflags=FLAGS)
    failures = io.StringIO()
    for example in finder.find(module, globs=names_of_examples()):
        runner.run(example, out=failures.write)
    assert not failures.getvalue(), failures.getvalue()
    assert runner.tries


class Public(NamedTuple):
    """A class, function or method that a caller may use."""

    name: str
    function: FunctionType | None  # None: nothing to call it with, or fields, which have comments
    documents: list[str]  # its docstring, and those of its class

    @property
    def parameters(self) -> list[str]:
        if self.function is None:
            return []
        return [name for name in inspect.signature(self.function).parameters if name not in ("self", "cls")]

    @property
    def has_example(self) -> bool:
        own, *of_class = self.documents
        name = self.name.rpartition(".")[2]
        # What an instance is called in an example, nobody knows.
        called = r">>> " if name == "__call__" else rf"(>>>|\.\.\.) .*\b{name}[()]"
        return ">>> " in own or any(re.search(called, text) for text in of_class)


def public() -> Iterator[Public]:
    for face in FACES:
        for name in face.__all__:
            obj = getattr(face, name)
            if inspect.isfunction(obj):
                yield Public(name, obj, [inspect.getdoc(obj) or ""])
            elif inspect.isclass(obj):
                yield from public_of_class(obj)


def public_of_class(cls: type) -> Iterator[Public]:
    text = inspect.getdoc(cls) or ""
    made = is_dataclass(cls) or hasattr(cls, "_fields") or getattr(cls, "_is_protocol", False)
    init = None if made else vars(cls).get("__init__")
    if init is not None:
        yield Public(cls.__name__, init, [inspect.getdoc(init) or "", text])
    ours = [base for base in reversed(cls.__mro__) if base.__module__.startswith(("codec_jax", "pallas_kernels"))]
    for name, member in {name: member for base in ours for name, member in vars(base).items()}.items():
        function = getattr(member, "__func__", member)
        if inspect.isfunction(function) and (not name.startswith("_") or name == "__call__"):
            yield Public(f"{cls.__name__}.{name}", function, [inspect.getdoc(function) or "", text])


def described(text: str) -> list[str]:
    """Return the names that an Args section describes."""
    section = re.search(r"^Args:\n((?:  .*\n?)+)", text, re.MULTILINE)
    entries = re.findall(r"^  (\w+(?:, \w+)*): \S", section[1], re.MULTILINE) if section else []
    return [name for entry in entries for name in entry.split(", ")]


def test_every_parameter_is_described() -> None:
    wrong = {
        one.name: (one.parameters, described(one.documents[0]))
        for one in public()
        if sorted(one.parameters) != sorted(described(one.documents[0]))
    }
    assert not wrong, "\n".join(f"{name}: has {has}, describes {says}" for name, (has, says) in wrong.items())


def test_every_callable_has_an_example() -> None:
    without = {one.name for one in public() if one.function is not None and not one.has_example}
    assert sorted(without ^ WITHOUT_EXAMPLE.keys()) == []


def test_the_reference_has_every_public_name() -> None:
    pages = "\n".join(page.read_text() for page in REFERENCE.parent.glob("*.md"))
    entries = set(re.findall(r"^\.\. (?:auto|py:)\w+:: \S*?(\w+)$", pages, re.MULTILINE))
    names = {name for face in FACES for name in face.__all__ if not isinstance(getattr(face, name), ModuleType)}
    assert names - {"__version__"} <= entries
