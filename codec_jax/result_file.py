"""The output of `codec_jax.generate`: whole rows only, appended as they finish, and which of them there are already.

Beside the file lies FILE.options.json, which says how it was made. It is there before the first row, so a file without
it was not made here and is left alone.

A row is with the operating system before the next one is written, so it outlives the process, however that ends.
Closing the file puts all rows on the disk. A power cut before that may take rows since the last closing: those that are
gone, and a last line that is torn, are made again; a file that is torn elsewhere is refused.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from codec_jax.nnx import Completion


class ResultFile:
    """A file of completions, open for more.

    `finished` holds the requests that it has, prompt * samples + sample, and `failed` those of them that ended in an
    error.
    """

    def __init__(self, file: Path, options: dict[str, Any], prompts: int, samples: int) -> None:
        """Open the file, or make it if there is none, and drop a last line that an interruption tore.

        `options` are what the rows depend on, as JSON values. Raises ValueError, and leaves the file as it was, if it
        was made with other options or by another command, if it has lines that are not rows of these prompts, if
        another run is writing it, or if it is a folder or a device.
        """
        if file.exists() and not file.is_file():
            raise ValueError(f"{file}: expected a file for the rows, got a folder or a device; name another --output")
        self._prompts, self._samples = prompts, samples
        self.finished: set[int] = set()
        self.failed: set[int] = set()
        # Without a buffer: after an error, one would still hold a part of a row, and write it when it is closed.
        self._out = file.open("ab+", buffering=0)
        try:
            try:
                fcntl.flock(self._out, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(f"{file}: expected a file that nobody writes to, but another run is at it") from error
            beside = file.with_name(file.name + ".options.json")
            if self._out.seek(0, os.SEEK_END):
                _check_options(file, beside, options)
                self._out.truncate(self._read(file))
            else:
                draft = beside.with_name(beside.name + ".part")
                with draft.open("w", encoding="utf-8") as out:
                    out.write(json.dumps(options, indent=2) + "\n")
                    out.flush()
                    os.fsync(out.fileno())
                draft.replace(beside)
        except BaseException:
            self._out.close()
            raise

    def write(self, request: int, text: str | None, completion: Completion) -> None:
        """Append one row, or nothing: what is there of it is taken back if it cannot be written as a whole."""
        prompt, sample = divmod(request, self._samples)
        row = {
            "prompt": prompt,
            **({"sample": sample} if self._samples > 1 else {}),
            "text": text,
            "tokens": completion.tokens,
            "logprobs": completion.logprobs,
            "finish_reason": completion.finish_reason,
        }
        line = json.dumps(row, ensure_ascii=False, allow_nan=False).encode("utf-8") + b"\n"
        whole = self._out.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[self._out.write(line) :]
        except BaseException:
            self._out.truncate(whole)
            raise
        self._add(request, row)

    def close(self) -> None:
        """Wait until all rows are on the disk, and let other runs have the file."""
        with self._out:
            os.fsync(self._out.fileno())

    def _read(self, file: Path) -> int:
        """Collect the finished requests; returns how many bytes whole lines take."""
        whole, problems = 0, []
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                try:
                    row = json.loads(line)
                    prompt, sample = row["prompt"], row["sample"] if self._samples > 1 else 0
                    known = type(prompt) is type(sample) is int
                except (ValueError, TypeError, LookupError, RecursionError):
                    known = False
                if not known or not (0 <= prompt < self._prompts and 0 <= sample < self._samples):
                    problems.append(f"line {number}: no row of these prompts")
                elif (request := prompt * self._samples + sample) in self.finished:
                    problems.append(f"line {number}: a completion that an earlier line has")
                else:
                    self._add(request, row)
        if problems:
            advice = f"{file}: expected rows that this command wrote; restore them or name another --output:"
            raise ValueError("\n  ".join([advice, *problems]))
        return whole

    def _add(self, request: int, row: dict[str, Any]) -> None:
        self.finished.add(request)
        if row.get("finish_reason") == "error":
            self.failed.add(request)


def _check_options(file: Path, beside: Path, options: dict[str, Any]) -> None:
    """Raise ValueError unless the rows that are there were made with these options."""
    try:
        made_with = json.loads(beside.read_text("utf-8"))
        changed = [name for name in {**made_with, **options} if made_with.get(name) != options.get(name)]
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{file}: expected a new file, or one that {beside.name} says the options of, got one without; "
            f"name another --output ({error})"
        ) from error
    if changed:
        differences = [f"{name}: {made_with.get(name)!r}, now {options.get(name)!r}" for name in changed]
        raise ValueError(
            "\n  ".join([f"{file}: made with other options; repeat them or name another --output:", *differences])
        )
