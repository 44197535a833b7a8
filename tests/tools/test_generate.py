"""The command that completes prompts: its rows against the model, interruptions, and what it refuses."""

import codecs
import errno
import fcntl
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import write_checkpoint
from flax import nnx
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from codec_jax import generate
from codec_jax.nnx import (
    PUBLISHED,
    Checkpoint,
    Completion,
    open_checkpoint,
    random_decoder,
)
from codec_jax.result_file import ResultFile

VOCAB, STOP, MAX_NEW, SAMPLES, CONTEXT = 40, 5, 20, 3, 128
RARE = VOCAB - 1  # in one prompt only
RNG = np.random.default_rng(0)
DOCUMENT = RNG.integers(6, RARE, 37).tolist()
# Rows 0, 2 and 4 share the document, 4 is longer than 0 by a few tokens, 3 is the text of row 1's tokens.
ROWS: list[dict[str, Any]] = [
    {"tokens": [*DOCUMENT, 7, 8]},
    {"tokens": [9, 10, 11], "note": "other keys are ignored"},
    {"tokens": [*DOCUMENT, 12]},
    {"text": "w9 w10 w11"},
    {"tokens": [*DOCUMENT, 7, 8, 13, 14]},
    {"tokens": [6, RARE, 7]},
]
PROMPTS = [row.get("tokens", [9, 10, 11]) for row in ROWS]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "checkpoint"
    directory.mkdir()
    write_checkpoint(directory, "llama", vocab_size=VOCAB, stop=STOP, max_context=CONTEXT, deviation=1.0, seed=2)
    return directory


def write_prompts(directory: Path, rows: list[dict[str, Any]]) -> Path:
    file = directory / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def copy(directory: Path, target: Path) -> Path:
    """A directory's files in another one, as old as they are."""
    return Path(shutil.copytree(directory, target))


def arguments(model_dir: Path, prompts: Path, output: Path, **changed: Any) -> list[str]:
    given = {
        "--model": model_dir,
        "--prompts": prompts,
        "--output": output,
        "--max-new-tokens": MAX_NEW,
        "--samples": SAMPLES,
        "--seed": 3,
        "--dtype": "float32",
        **{"--" + name.replace("_", "-"): value for name, value in changed.items()},
    }
    return [str(part) for pair in given.items() if pair[1] is not None for part in pair]


def rows_of(file: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """Rows by prompt and sample, which must be there once."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    keyed = {(row["prompt"], row.get("sample", 0)): row for row in rows}
    assert len(keyed) == len(rows)
    return keyed


class Finished:
    """The output of a run that nothing interrupted. Runs of the same sizes compile nothing."""

    def __init__(self, model_dir: Path, directory: Path) -> None:
        self.model_dir, self.directory = model_dir, directory
        self.prompts, self.output = write_prompts(directory, ROWS), directory / "out.jsonl"
        self.arguments = partial(arguments, model_dir, self.prompts)
        generate.main(self.arguments(self.output))
        self.rows = rows_of(self.output)

    def copy(self, directory: Path) -> Path:
        """The output and what is beside it, in another place."""
        for file in self.directory.glob("out.jsonl*"):
            (directory / file.name).write_bytes(file.read_bytes())
        return directory / "out.jsonl"


@pytest.fixture(scope="module")
def finished(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return Finished(model_dir, tmp_path_factory.mktemp("finished"))


@pytest.fixture
def _leaves_by_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command would take the tests' process with it."""
    monkeypatch.setattr(os, "_exit", sys.exit)


@pytest.fixture
def _no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(Checkpoint, "load", load)


# --- Rows -------------------------------------------------------------------------------------------------------


def test_every_prompt_has_all_its_samples(finished: Finished) -> None:
    assert finished.rows.keys() == {(prompt, sample) for prompt in range(len(ROWS)) for sample in range(SAMPLES)}
    for row in finished.rows.values():
        assert list(row) == ["prompt", "sample", "text", "tokens", "logprobs", "finish_reason"]
        stopped = row["tokens"][-1] == STOP
        assert row["finish_reason"] == ("stop" if stopped else "length")
        assert stopped or len(row["tokens"]) == MAX_NEW
        assert STOP not in row["tokens"][:-1]
        assert row["text"] == " ".join(f"w{token}" for token in row["tokens"] if token != STOP)
    assert {row["finish_reason"] for row in finished.rows.values()} == {"stop", "length"}
    # The same prompt draws anew in every row and sample.
    assert len({tuple(row["tokens"]) for row in finished.rows.values()}) == len(finished.rows)


def test_log_probabilities_are_those_of_dense_attention(finished: Finished) -> None:
    graph, weights = nnx.split(open_checkpoint(finished.model_dir).load(jnp.float32))
    forward = jax.jit(lambda weights, tokens: jax.nn.log_softmax(nnx.merge(graph, weights)(tokens)))
    for (prompt, _), row in finished.rows.items():
        tokens = np.zeros((1, 64), np.int32)
        context = [*PROMPTS[prompt], *row["tokens"]]
        tokens[0, : len(context)] = context
        want = np.asarray(forward(weights, tokens))[0, np.arange(len(PROMPTS[prompt]), len(context)) - 1, row["tokens"]]
        np.testing.assert_allclose(row["logprobs"], want, atol=1e-4)


def test_greedy_completions_are_those_of_transformers(finished: Finished, tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        finished.model_dir, dtype=torch.float32, local_files_only=True
    )
    generate.main(finished.arguments(tmp_path / "out.jsonl", temperature=0))
    rows = rows_of(tmp_path / "out.jsonl")
    assert rows.keys() == finished.rows.keys()
    for (prompt, _), row in rows.items():
        want = theirs.generate(
            torch.tensor([PROMPTS[prompt]]),
            max_new_tokens=MAX_NEW,
            do_sample=False,
            eos_token_id=STOP,
            pad_token_id=STOP,
        )
        assert row["tokens"] == want[0, len(PROMPTS[prompt]) :].tolist()


def test_a_stop_token_that_is_no_special_one_is_left_out_of_the_text_too(finished: Finished, tmp_path: Path) -> None:
    model = copy(finished.model_dir, tmp_path / "model")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = []
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert Tokenizer.from_file(str(model / "tokenizer.json")).decode([STOP]) == f"w{STOP}"
    generate.main(arguments(model, finished.prompts, tmp_path / "out.jsonl"))
    assert rows_of(tmp_path / "out.jsonl") == finished.rows


def test_random_weights_complete_token_ids(finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(open_checkpoint(finished.model_dir).config, dtype=jnp.float32, param_dtype=jnp.float32)
    monkeypatch.setitem(PUBLISHED, "qwen3-4b", replace(config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16))
    prompts, output = write_prompts(tmp_path, [{"tokens": prompt} for prompt in PROMPTS]), tmp_path / "out.jsonl"
    generate.main(arguments(tmp_path, prompts, output, model=None, random_weights="qwen3-4b", temperature=0))
    rows = rows_of(output)
    assert rows.keys() == finished.rows.keys()
    assert {(row["text"], len(row["tokens"]), row["finish_reason"]) for row in rows.values()} == {
        (None, MAX_NEW, "length")
    }
    context = [*PROMPTS[1], *rows[1, 0]["tokens"]]
    logits = nnx.jit(random_decoder(config))(jnp.asarray([context]))
    assert rows[1, 0]["tokens"] == logits[0, len(PROMPTS[1]) - 1 : -1].argmax(-1).tolist()


TEMPLATE = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}w6"


def test_chats_are_completed_by_the_template_of_the_checkpoint(finished: Finished, tmp_path: Path) -> None:
    """Two chats begin alike, and one is the tokens of another row."""
    model = copy(finished.model_dir, tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    chat = [{"role": "w9", "content": "w10 w11"}]
    turns = [*chat, {"role": "w12", "content": "w13"}]
    rows: list[dict[str, Any]] = [{"messages": chat}, {"messages": turns}, {"tokens": [9, 10, 11, 6]}]
    prompts, output = write_prompts(tmp_path, [*rows, {"messages": "w1"}]), tmp_path / "out.jsonl"
    error = refused(arguments(model, prompts, output))
    assert error.splitlines()[1:] == ["  line 4: messages: expected a list of at least one message, got 'w1'"]
    generate.main(arguments(model, write_prompts(tmp_path, rows), output, temperature=0, samples=1))
    tokens = {prompt: row["tokens"] for (prompt, _), row in rows_of(output).items()}
    assert tokens[0] == tokens[2]
    decoder = open_checkpoint(model).load(jnp.float32)
    context = [9, 10, 11, 12, 13, 6, *tokens[1]]
    assert nnx.jit(decoder)(jnp.asarray([context]))[0, 5:-1].argmax(-1).tolist() == tokens[1]


@pytest.mark.parametrize("option", ["stop", "stop_token"])
def test_texts_end_where_they_are_asked_to(finished: Finished, tmp_path: Path, option: str) -> None:
    """With words of two completions as stops, those of the finished run are cut at whichever comes first."""
    first, second = [row["tokens"] for row in finished.rows.values() if row["finish_reason"] == "length"][:2]
    stops = {first[4], second[9]}
    given = finished.arguments(tmp_path / "out.jsonl")
    for stop in stops:
        given += ["--" + option.replace("_", "-"), f"w{stop} " if option == "stop" else str(stop)]
    generate.main(given)
    rows, cut = rows_of(tmp_path / "out.jsonl"), 0
    for key, row in finished.rows.items():
        tokens, text = row["tokens"], row["text"]
        # A string that ends with a space is there when the next word is.
        more = [i for i in range(len(tokens) - 1) if tokens[i + 1] != STOP] if option == "stop" else range(len(tokens))
        if ends := [i for i in more if tokens[i] in stops]:
            text = " ".join(f"w{token}" for token in tokens[: ends[0]])
            tokens = tokens[: ends[0] + 1 + (option == "stop")]
        assert rows[key]["tokens"] == tokens
        assert rows[key]["text"].rstrip() == text
        assert rows[key]["finish_reason"] == ("stop" if ends else row["finish_reason"])
        assert len(rows[key]["logprobs"]) == len(tokens)
        cut += bool(ends)
    assert cut > 4


def test_a_document_is_computed_once_however_few_are_decoded_at_a_time(
    finished: Finished, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """With a single row, whatever a request does not find in the cache is computed for it."""
    generate.main(finished.arguments(tmp_path / "out.jsonl", max_requests=1))
    rows = rows_of(tmp_path / "out.jsonl")
    assert {key: row["tokens"] for key, row in rows.items()} == {
        key: row["tokens"] for key, row in finished.rows.items()
    }
    [numbers] = re.findall(
        r"(\d+) tokens in .* tokens/s, .*; (\d+) tokens of prompts, (\d+) of them computed: sharing factor ([\d.]+)",
        capsys.readouterr().err,
    )
    generated, given, computed, factor = map(float, numbers)
    assert generated == sum(len(row["tokens"]) for row in rows.values())
    assert given == SAMPLES * sum(map(len, PROMPTS))
    assert factor == round(given / computed, 1)
    # Of nine requests with the document all but the first find its two whole pages.
    different = len({tuple(prompt[:end]) for prompt in PROMPTS for end in range(1, len(prompt) + 1)})
    assert different <= computed <= given - 8 * 32


@pytest.mark.skipif(len(jax.devices()) < 4, reason="needs four devices")
def test_replicas_write_the_same_rows(finished: Finished, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    sizes = {"data_parallel": 2, "tensor_parallel": 2}
    generate.main(finished.arguments(tmp_path / "out.jsonl", max_requests=2, **sizes))
    rows = rows_of(tmp_path / "out.jsonl")
    assert rows.keys() == finished.rows.keys()
    for key, row in rows.items():
        assert row["tokens"] == finished.rows[key]["tokens"]
        np.testing.assert_allclose(row["logprobs"], finished.rows[key]["logprobs"], atol=1e-4)
    [computed] = re.findall(r"(\d+) of them computed", capsys.readouterr().err)
    assert int(computed) < SAMPLES * sum(map(len, PROMPTS)) - 4 * 32


@pytest.mark.usefixtures("_no_work")
@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"data_parallel": 1000}, "--data-parallel: expected at most the 8 devices that there are, got 1000"),
        ({"tensor_parallel": 3}, "mesh: expected an axis 'tensor' that divides the 2 kv heads"),
    ],
    ids=str,
)
def test_devices_that_there_are_not_are_refused(
    finished: Finished, tmp_path: Path, sizes: dict[str, int], expected: str
) -> None:
    assert expected in refused(finished.arguments(tmp_path / "out.jsonl", **sizes))


@pytest.mark.usefixtures("_no_work")
def test_requests_are_not_computed_as_if_alone_from_parts(finished: Finished, tmp_path: Path) -> None:
    wrong = [*finished.arguments(tmp_path / "out.jsonl", context_parallel=2), "--invariant"]
    assert "--invariant: expected no --context-parallel, which adds up parts, got 2" in refused(wrong)
    other = [*finished.arguments(finished.copy(tmp_path)), "--invariant"]
    assert refused(other).splitlines()[1:] == ["  invariant: False, now True"]


@pytest.mark.usefixtures("_leaves_by_exception")
def test_requests_are_computed_as_if_alone_on_demand(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spy(*_: Any, **options: Any) -> None:
        asked.append(options["invariant"])
        raise KeyboardInterrupt

    asked: list[bool] = []
    monkeypatch.setattr(generate, "Engine", spy)
    for number, option in enumerate(([], ["--invariant"])):
        with pytest.raises(SystemExit):
            generate.main([*finished.arguments(tmp_path / f"{number}.jsonl"), *option])
    assert asked == [False, True]


# --- Interruptions ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_leaves_by_exception")
@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(errno.ENOSPC, "No space left"), 1, "[Errno 28] No space left"),
    ],
    ids=["interrupted", "disk full"],
)
def test_a_run_that_was_cut_off_goes_on_where_it_was(
    finished: Finished,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    error: BaseException,
    status: int,
    message: str,
) -> None:
    output, write = tmp_path / "out.jsonl", ResultFile.write

    def interrupted(self: ResultFile, *row: Any) -> None:
        if len(self.finished) == 4:
            raise error
        write(self, *row)

    with monkeypatch.context() as patch:
        patch.setattr(ResultFile, "write", interrupted)
        with pytest.raises(SystemExit) as ended:
            generate.main(finished.arguments(output))
    assert ended.value.code == status
    assert f"codec_jax.generate: {message}: 4 of 18 completions" in capsys.readouterr().err.splitlines()[-1]
    first = output.read_bytes()
    assert len(rows_of(output)) == 4
    output.write_bytes(first + b'{"prompt": 1, "sample": 0, "text": "w\xc3')  # torn inside a character

    generate.main(finished.arguments(output))
    assert output.read_bytes().startswith(first)
    tokens = {key: row["tokens"] for key, row in rows_of(output).items()}
    assert tokens == {key: row["tokens"] for key, row in finished.rows.items()}


def test_a_process_that_is_interrupted_while_it_compiles_goes_on_with_other_sizes(
    finished: Finished, tmp_path: Path
) -> None:
    """Two requests at a time in place of all, prompts from a pipe, and from `python -m codec_jax`.

    Threads that compile when the interpreter is taken down may end the process by a signal; what stands for them here
    does so always.
    """
    output = tmp_path / "out.jsonl"
    given = [*arguments(finished.model_dir, Path("/dev/stdin"), output, max_requests=2)]
    deadly = "import atexit, os; atexit.register(os.abort); from codec_jax.generate import main; main()"
    with (
        finished.prompts.open() as prompts,
        subprocess.Popen([sys.executable, "-c", deadly, *given], stdin=prompts, stderr=subprocess.PIPE) as process,
    ):
        assert process.stderr is not None
        said = b""
        while b"compiling" not in said:
            said += (new := os.read(process.stderr.fileno(), 4096))
            assert new, said
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 130, said
    assert b"interrupted: 0 of 18 completions" in said

    command = [sys.executable, "-m", "codec_jax", "generate", *given]
    subprocess.run(command, input=finished.prompts.read_bytes(), check=True, capture_output=True)
    rows = rows_of(output)
    assert {key: row["tokens"] for key, row in rows.items()} == {
        key: row["tokens"] for key, row in finished.rows.items()
    }


@pytest.mark.usefixtures("_no_work")
def test_a_finished_run_is_left_alone_and_says_so(
    finished: Finished, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    output = finished.copy(tmp_path)
    generate.main(finished.arguments(output))
    assert output.read_bytes() == finished.output.read_bytes()
    said = capsys.readouterr().err
    assert "nothing to do" in said
    assert f"18 completions are in {output}" in said


def test_a_prompt_whose_logits_are_not_finite_fails_alone(finished: Finished, tmp_path: Path) -> None:
    """With a token whose embedding is NaN, those that read it fail, and nobody else."""
    model, output = copy(finished.model_dir, tmp_path / "model"), tmp_path / "out.jsonl"
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][RARE] = np.nan
    save_file(weights, model / "model.safetensors")
    reads = {}  # tokens that a completion has when it feeds the broken one
    for (prompt, sample), row in finished.rows.items():
        context = [*PROMPTS[prompt], *row["tokens"]]
        if RARE in context[:-1]:
            reads[prompt, sample] = max(context.index(RARE) + 1 - len(PROMPTS[prompt]), 0)
    assert len({prompt for prompt, _ in reads}) < len(PROMPTS)
    assert len(set(reads.values())) > 2

    lines = f"in lines {', '.join(str(prompt + 1) for prompt in sorted({prompt for prompt, _ in reads}))};"
    error = refused(arguments(model, finished.prompts, output))
    assert f"ended {len(reads)} of them" in error
    assert lines in error
    assert "NaN" not in output.read_text()
    rows = rows_of(output)
    assert {key for key, row in rows.items() if row["finish_reason"] == "error"} == reads.keys()
    for key, row in rows.items():
        if key not in reads:
            assert (row["finish_reason"], row["tokens"]) == (
                finished.rows[key]["finish_reason"],
                finished.rows[key]["tokens"],
            )
            continue
        # What was generated up to the last look at the device.
        assert len(row["tokens"]) <= reads[key]
        assert row["tokens"] == finished.rows[key]["tokens"][: len(row["tokens"])]
        assert len(row["logprobs"]) == len(row["tokens"])
        assert row["text"] == " ".join(f"w{token}" for token in row["tokens"])
    assert any(rows[key]["tokens"] for key in reads)

    # They are not made again, and the command says so again, until they are deleted.
    before = output.read_bytes()
    assert lines in refused(arguments(model, finished.prompts, output))
    assert output.read_bytes() == before
    output.write_bytes(b"".join(line for line in before.splitlines(True) if b'"error"' not in line))
    assert lines in refused(arguments(model, finished.prompts, output))
    assert {key: row["finish_reason"] for key, row in rows_of(output).items()} == {
        key: row["finish_reason"] for key, row in rows.items()
    }


def test_numbers_too_large_for_their_scales_are_said(
    finished: Finished, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    model = copy(finished.model_dir, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    for name in weights:
        if "v_proj" in name:
            weights[name] = weights[name] * np.float32(1e4)
    save_file(weights, model / "model.safetensors")
    for kv_dtype in ("fp8", None):
        output = tmp_path / f"{kv_dtype}.jsonl"
        generate.main(arguments(model, finished.prompts, output, samples=1, max_new_tokens=2, kv_dtype=kv_dtype))
        assert ("were too large for their scales" in capsys.readouterr().err) == (kv_dtype == "fp8")


def test_a_row_that_does_not_fit_on_the_disk_leaves_no_part_of_it(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the last row fits in part."""
    output, limits = tmp_path / "out.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    completion = Completion(0, list(range(100)), [-1.0] * 100, "length")
    results = ResultFile(output, {}, 3, 1)
    results.write(0, None, completion)
    whole = output.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            results.write(1, None, completion)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert output.read_bytes() == whole
    results.write(2, None, completion)
    results.close()
    rows = rows_of(output)
    assert sorted(rows) == [(0, 0), (2, 0)]
    assert "sample" not in rows[0, 0]
    assert results.finished == {0, 2}


def test_rows_are_on_the_disk_when_the_file_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, synced = ResultFile(tmp_path / "out.jsonl", {}, 1, 1), []
    results.write(0, None, Completion(0, [1], [-1.0], "length"))
    monkeypatch.setattr(os, "fsync", lambda file: synced.append((os.fstat(file).st_ino, os.fstat(file).st_size)))
    results.close()
    status = (tmp_path / "out.jsonl").stat()
    assert synced == [(status.st_ino, status.st_size)]
    ResultFile(tmp_path / "out.jsonl", {}, 1, 1).close()  # nobody holds the lock


def test_rows_go_to_a_file_and_to_nothing_else(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(ValueError, match=f"^{path}: expected a file for the rows, got"):
            ResultFile(path, {}, 1, 1)
        assert not path.with_name(path.name + ".options.json").exists()


# --- Output files that are not to be touched --------------------------------------------------------------------


def refused(argv: list[str]) -> str:
    """The message that the command ends with."""
    with pytest.raises(SystemExit) as ended:
        generate.main(argv)
    assert isinstance(ended.value.code, str)
    return ended.value.code


@pytest.mark.usefixtures("_no_work")
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("seed", 4, "seed: 3, now 4"),
        ("temperature", 0.5, "temperature: 1.0, now 0.5"),
        ("top_k", 2, "top_k: None, now 2"),
        ("top_p", 0.5, "top_p: 1.0, now 0.5"),
        ("min_p", 0.5, "min_p: 0.0, now 0.5"),
        ("repetition_penalty", 1.5, "repetition_penalty: 1.0, now 1.5"),
        ("stop", "w7", "stop: [], now ['w7']"),
        ("stop_token", 7, "stop_token: [], now [7]"),
        ("samples", 2, "samples: 3, now 2"),
        ("max_new_tokens", 8, "max_new_tokens: 20, now 8"),
        ("dtype", "bfloat16", "dtype: 'float32', now 'bfloat16'"),
    ],
)
def test_a_file_made_with_other_options_is_left_alone(
    finished: Finished, tmp_path: Path, option: str, value: Any, message: str
) -> None:
    output = finished.copy(tmp_path)
    error = refused(finished.arguments(output, **{option: value}))
    assert error.splitlines()[1:] == [f"  {message}"]
    assert output.read_bytes() == finished.output.read_bytes()


@pytest.mark.usefixtures("_no_work")
def test_a_file_made_from_other_prompts_is_left_alone_also_if_they_come_from_a_pipe(
    finished: Finished, tmp_path: Path
) -> None:
    output, prompts = finished.copy(tmp_path), write_prompts(tmp_path, ROWS[::-1])
    pipe, end = os.pipe()
    with open(end, "wb") as out:
        out.write(prompts.read_bytes())
    was, now = (hashlib.sha256(file.read_bytes()).hexdigest() for file in (finished.prompts, prompts))
    for file in (Path(f"/dev/fd/{pipe}"), prompts):
        error = refused(arguments(finished.model_dir, file, output))
        assert error.splitlines()[1:] == [f"  prompts_sha256: {was!r}, now {now!r}"]
    os.close(pipe)
    assert output.read_bytes() == finished.output.read_bytes()


@pytest.mark.usefixtures("_no_work")
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_file_made_with_other_weights_is_left_alone(finished: Finished, tmp_path: Path, name: str) -> None:
    """As is one whose newest file stays the newest, while another is exchanged."""
    output, model = finished.copy(tmp_path), copy(finished.model_dir, tmp_path / finished.model_dir.name)
    generate.main(arguments(model, finished.prompts, output))  # a checkpoint may move
    status = (model / name).stat()
    os.utime(model / name, ns=(status.st_atime_ns, status.st_mtime_ns - 10**9))
    (problem,) = refused(arguments(model, finished.prompts, output)).splitlines()[1:]
    assert problem.startswith(f"  model/{name}: '{status.st_size} bytes, ")
    assert output.read_bytes() == finished.output.read_bytes()


@pytest.mark.usefixtures("_no_work")
@pytest.mark.parametrize(
    ("added", "message"),
    [
        (b"not JSON\n", "line 19: no row of these prompts"),
        (b'{"prompt": 6, "sample": 0}\n', "line 19: no row of these prompts"),
        (b'{"prompt": 0}\n', "line 19: no row of these prompts"),
        (b'{"prompt": 0, "sample": 2}\n', "line 19: a completion that an earlier line has"),
    ],
)
def test_a_file_with_other_lines_is_left_alone(finished: Finished, tmp_path: Path, added: bytes, message: str) -> None:
    output = finished.copy(tmp_path)
    output.write_bytes(finished.output.read_bytes() + added + b"torn")
    error = refused(finished.arguments(output))
    assert error.splitlines()[1:] == [f"  {message}"]
    assert output.read_bytes() == finished.output.read_bytes() + added + b"torn"


@pytest.mark.usefixtures("_no_work")
@pytest.mark.parametrize("beside", [None, "", "[]"])
def test_a_file_that_nothing_says_the_options_of_is_left_alone(
    finished: Finished, tmp_path: Path, beside: str | None
) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("precious, without a newline")
    if beside is not None:
        (tmp_path / "out.jsonl.options.json").write_text(beside)
    assert "expected a new file, or one that out.jsonl.options.json says" in refused(finished.arguments(output))
    assert output.read_text() == "precious, without a newline"


@pytest.mark.usefixtures("_no_work")
def test_a_file_that_another_run_writes_is_left_alone(finished: Finished, tmp_path: Path) -> None:
    output = finished.copy(tmp_path)
    with output.open("ab") as out:
        fcntl.flock(out, fcntl.LOCK_EX)
        assert "another run is at it" in refused(finished.arguments(output))


@pytest.mark.usefixtures("_no_work")
def test_an_output_in_no_directory_is_refused(finished: Finished, tmp_path: Path) -> None:
    error = refused(finished.arguments(tmp_path / "nowhere" / "out.jsonl"))
    assert "--output: expected a file in an existing directory" in error


# --- Bad prompts ------------------------------------------------------------------------------------------------


BAD = {
    b"": "expected JSON, got b''",
    b'{"text": "w1"': "expected JSON, got",
    b'{"text": "\xff"}': "expected JSON, got",
    b"[1, 2]": 'expected an object with one of "text", "messages" and "tokens", got',
    b'{"prompt": "w1"}': 'expected an object with one of "text", "messages" and "tokens", got',
    b'{"text": "w1", "tokens": [1]}': 'expected an object with one of "text", "messages" and "tokens", got',
    b'{"text": 7}': 'expected a string as "text", got 7',
    b'{"messages": [{"role": "user", "content": "w1"}]}': 'expected "text" or "tokens": checkpoint has no',
    b'{"text": " "}': "expected at least one token, got none",
    b'{"tokens": []}': "expected at least one token, got none",
    b'{"tokens": "w1"}': 'expected a list of token ids as "tokens"',
    b'{"tokens": [1, true]}': 'expected a list of token ids as "tokens"',
    b'{"tokens": [1, 2.0]}': 'expected a list of token ids as "tokens"',
    b'{"tokens": [1, 40]}': "tokens: expected tokens in [0, 40), got tokens[1] = 40",
    b'{"tokens": [-1]}': "tokens: expected tokens in [0, 40), got tokens[0] = -1",
    b'{"tokens": [99999999999]}': "tokens: expected integers below 2**31, got",
    b'{"text": "\\ud800"}': "expected JSON, got",
    b'{"tokens": ['
    + b", ".join([b"1"] * 109)
    + b"]}": "expected at most 128 tokens, which the model was made for, got",
}


@pytest.mark.usefixtures("_no_work")
def test_all_bad_rows_are_listed_with_their_lines(model_dir: Path, tmp_path: Path) -> None:
    prompts, good = tmp_path / "prompts.jsonl", b'{"text": "w1"}\n'
    # The mark that some editors begin a file with is no part of its first line.
    prompts.write_bytes(codecs.BOM_UTF8 + b"".join(good + bad + b"\n" for bad in BAD))
    problems = refused(arguments(model_dir, prompts, tmp_path / "out.jsonl")).splitlines()[1:]
    for i, (problem, message) in enumerate(zip(problems, BAD.values(), strict=True)):
        assert problem.startswith(f"  line {2 * i + 2}: {message}")
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.usefixtures("_no_work")
def test_no_prompts_are_refused(model_dir: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, [])
    assert "expected a prompt in each line, got an empty file" in refused(arguments(model_dir, prompts, tmp_path / "o"))
    missing = refused(arguments(model_dir, tmp_path / "p", tmp_path / "o"))
    assert f"--prompts: expected a file that can be read, got {tmp_path / 'p'}: No such file" in missing
    assert "--model: expected one with config.json" in refused(arguments(tmp_path / "m", prompts, tmp_path / "o"))


def test_random_weights_take_no_text(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"tokens": [1]}, {"text": "w1"}, {"messages": []}]
    given = partial(arguments, tmp_path, output=tmp_path / "o", model=None, random_weights="llama-3.2-1b")
    assert refused(given(write_prompts(tmp_path, rows))).splitlines()[1:] == [
        f'  line {line}: expected "tokens": random weights have no tokenizer for "{kind}"'
        for line, kind in ((2, "text"), (3, "messages"))
    ]
    assert "--stop: expected none" in refused(given(write_prompts(tmp_path, rows[:1]), stop="w1"))


@pytest.mark.usefixtures("_no_work")
def test_prompts_whose_kv_does_not_fit_are_listed(finished: Finished, tmp_path: Path) -> None:
    """A page of 16 tokens takes 4 KiB here; of a completion, all tokens but the last are kept."""
    error = refused(finished.arguments(tmp_path / "o", kv_cache_gib=3 * 2**12 / 2**30))
    assert error.splitlines()[1:] == [f"  line {line}: needs 4 pages" for line in (1, 3, 5)]


@pytest.mark.usefixtures("_no_work")
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("temperature", -1, "temperature: expected a finite number of at least 0, got -1.0"),
        ("top_p", 0, "top_p: expected a probability in"),
        ("min_p", 2, "min_p: expected a probability in"),
        ("repetition_penalty", 0, "repetition_penalty: expected a number above 0"),
        ("stop", "", "stop"),
        ("stop_token", VOCAB, f"--stop-token: expected tokens in [0, {VOCAB}), got --stop-token[0] = {VOCAB}"),
    ],
)
def test_sampling_options_out_of_range_are_refused(
    finished: Finished, tmp_path: Path, option: str, value: float, message: str
) -> None:
    assert message in refused(finished.arguments(tmp_path / "o", **{option: value}))
    assert not (tmp_path / "o").exists()


def test_more_samples_than_there_are_numbers_for_are_refused(finished: Finished, tmp_path: Path) -> None:
    assert "--samples: expected fewer than 2**31" in refused(finished.arguments(tmp_path / "o", samples=2**31))
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("options", "values", "message"),
    [
        (["max_new_tokens", "samples", "max_requests", "top_k"], ["0", "-1", "1.5"], "a positive whole number"),
        (["seed"], ["-1", "4294967296", "1.5"], r"a whole number from 0 to 2**32 - 1"),
        (["kv_cache_gib"], ["0", "-1", "nan", "inf", "1e300", "all"], "a positive number of GiB"),
    ],
    ids=["counts", "seed", "memory"],
)
def test_numbers_that_cannot_be_are_refused(
    finished: Finished,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    options: list[str],
    values: list[str],
    message: str,
) -> None:
    for option, value in product(options, values):
        with pytest.raises(SystemExit, match="2"):
            generate.main(finished.arguments(tmp_path / "o", **{option: value}))
        error = capsys.readouterr().err
        assert f"argument --{option.replace('_', '-')}: expected {message}, got '{value}'" in error
