"""The command that completes prompts: its rows against the model, interruptions, and what it refuses."""

import errno
import fcntl
import hashlib
import json
import os
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
    Decoder,
    Sampler,
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
    directory = tmp_path_factory.mktemp("model")
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
    """The output of a run that nothing interrupted, and its compiled sampler."""

    def __init__(self, model_dir: Path, directory: Path) -> None:
        self.model_dir, self.directory = model_dir, directory
        self.prompts, self.output = write_prompts(directory, ROWS), directory / "out.jsonl"
        self.arguments = partial(arguments, model_dir, self.prompts)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(generate, "Sampler", self._new_sampler)
            generate.main(self.arguments(self.output))
        self.rows = rows_of(self.output)

    def _new_sampler(self, model: Decoder, **sizes: int) -> Sampler:
        self.sampler, self.sizes = Sampler(model, **sizes), sizes
        return self.sampler

    def same_sampler(self, model: Decoder, **sizes: int) -> Sampler:
        """The sampler again, in place of one of the same sizes that would have to be compiled."""
        assert sizes == self.sizes
        self.sampler.update_weights(model)
        return self.sampler

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


def test_greedy_completions_are_those_of_transformers(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        finished.model_dir, dtype=torch.float32, local_files_only=True
    )
    monkeypatch.setattr(generate, "Sampler", finished.same_sampler)
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


def test_a_stop_token_that_is_no_special_one_is_left_out_of_the_text_too(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy(finished.model_dir, tmp_path / "model")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = []
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert Tokenizer.from_file(str(model / "tokenizer.json")).decode([STOP]) == f"w{STOP}"
    monkeypatch.setattr(generate, "Sampler", finished.same_sampler)
    generate.main(arguments(model, finished.prompts, tmp_path / "out.jsonl"))
    assert rows_of(tmp_path / "out.jsonl") == finished.rows


def test_random_weights_complete_token_ids(finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = finished.sampler.config
    monkeypatch.setitem(PUBLISHED, "qwen3-4b", replace(config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16))
    monkeypatch.setattr(generate, "Sampler", finished.same_sampler)
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
    """The sizes of the sampler are the same too, whatever is left to do."""
    output, write = tmp_path / "out.jsonl", ResultFile.write
    monkeypatch.setattr(generate, "Sampler", finished.same_sampler)

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


def test_a_process_that_is_interrupted_while_it_compiles_goes_on_in_other_batches(
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


def test_a_prompt_whose_logits_are_not_finite_fails_alone(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a token whose embedding is NaN, whoever reads it fails, and nobody else."""
    model, output = copy(finished.model_dir, tmp_path / "model"), tmp_path / "out.jsonl"
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][RARE] = np.nan
    save_file(weights, model / "model.safetensors")
    steps = finished.sampler.steps
    want = {}
    for (prompt, sample), row in finished.rows.items():
        context = [*PROMPTS[prompt], *row["tokens"]]
        reads = context.index(RARE) + 1 - len(PROMPTS[prompt]) if RARE in context[:-1] else None
        if reads is None:
            want[prompt, sample] = row["finish_reason"], row["tokens"]
        else:  # what was generated up to the last look at the device
            want[prompt, sample] = "error", row["tokens"][: max(reads, 0) // steps * steps]
    failed = [key for key, (reason, _) in want.items() if reason == "error"]
    assert {len(want[key][1]) for key in failed} == {0, steps}
    assert len({prompt for prompt, _ in failed}) < len(PROMPTS)

    lines = f"in lines {', '.join(str(prompt + 1) for prompt in sorted({prompt for prompt, _ in failed}))};"
    with monkeypatch.context() as patch:
        patch.setattr(generate, "Sampler", finished.same_sampler)
        error = refused(arguments(model, finished.prompts, output))
    assert f"ended {len(failed)} of them" in error
    assert lines in error
    assert "NaN" not in output.read_text()
    rows = rows_of(output)
    assert {key: (row["finish_reason"], row["tokens"]) for key, row in rows.items()} == want
    for key in failed:
        assert len(rows[key]["logprobs"]) == len(rows[key]["tokens"])
        assert rows[key]["text"] == " ".join(f"w{token}" for token in rows[key]["tokens"])

    # They are not made again, and the command says so again, until they are deleted.
    before = output.read_bytes()
    assert lines in refused(arguments(model, finished.prompts, output))
    assert output.read_bytes() == before
    output.write_bytes(b"".join(line for line in before.splitlines(True) if b'"error"' not in line))
    monkeypatch.setattr(generate, "Sampler", finished.same_sampler)
    assert lines in refused(arguments(model, finished.prompts, output))
    assert {key: row["finish_reason"] for key, row in rows_of(output).items()} == {
        key: reason for key, (reason, _) in want.items()
    }


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
    b"[1, 2]": 'expected an object with either "text" or "tokens", got',
    b'{"prompt": "w1"}': 'expected an object with either "text" or "tokens", got',
    b'{"text": "w1", "tokens": [1]}': 'expected an object with either "text" or "tokens", got',
    b'{"text": 7}': 'expected a string as "text", got 7',
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
    prompts.write_bytes(b"".join(good + bad + b"\n" for bad in BAD))
    problems = refused(arguments(model_dir, prompts, tmp_path / "out.jsonl")).splitlines()[1:]
    for i, (problem, message) in enumerate(zip(problems, BAD.values(), strict=True)):
        assert problem.startswith(f"  line {2 * i + 2}: {message}")
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.usefixtures("_no_work")
def test_no_prompts_are_refused(model_dir: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, [])
    assert "expected a prompt in each line, got an empty file" in refused(arguments(model_dir, prompts, tmp_path / "o"))
    assert "No such file" in refused(arguments(model_dir, tmp_path / "p", tmp_path / "o"))


def test_random_weights_take_no_text(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, [{"tokens": [1]}, {"text": "w1"}])
    error = refused(arguments(tmp_path, prompts, tmp_path / "o", model=None, random_weights="llama-3.2-1b"))
    assert error.splitlines()[1:] == ['  line 2: expected "tokens": random weights have no tokenizer for "text"']


@pytest.mark.usefixtures("_no_work")
def test_prompts_whose_kv_does_not_fit_are_listed(finished: Finished, tmp_path: Path) -> None:
    """A page of 16 tokens takes 4 KiB here: four pages are two for a prompt, and two for what is new."""
    error = refused(finished.arguments(tmp_path / "o", kv_cache_gib=4 * 2**12 / 2**30))
    assert error.splitlines()[1:] == [f"  line {line}: needs 5 pages" for line in (1, 3, 5)]


@pytest.mark.usefixtures("_no_work")
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("temperature", -1, "temperature: expected a finite number of at least 0, got -1.0"),
        ("top_p", 0, "top_p: expected a probability in"),
    ],
)
def test_sampling_options_out_of_range_are_refused(
    finished: Finished, tmp_path: Path, option: str, value: float, message: str
) -> None:
    assert message in refused(finished.arguments(tmp_path / "o", **{option: value}))
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("options", "values", "message"),
    [
        (["max_new_tokens", "samples", "max_requests", "top_k"], ["0", "-1", "1.5"], "a positive whole number"),
        (["seed"], ["-1", "4294967296", "1.5"], r"a whole number from 0 to 2**32 - 1"),
        (["kv_cache_gib"], ["0", "-1", "nan", "inf", "all"], "a positive number of GiB"),
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


# --- Streams ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [[0], [0, -1], [0, 1, 2], [0.5, 1.0]])
def test_streams_must_be_one_number_for_each_request(finished: Finished, streams: list) -> None:
    with pytest.raises(ValueError, match=r"^streams: expected "):
        finished.sampler.start([[1], [2]], streams=streams)


def test_forks_draw_from_streams_that_no_request_has(finished: Finished) -> None:
    state = finished.sampler.start([[6], [7]], streams=[4, 1])
    state, forks = finished.sampler.fork(state, [0, 1])
    assert state.stream[[0, 1, *forks]].tolist() == [4, 1, 5, 6]
