"""The output of `codec_jax.generate`: whole rows only, appended as they finish, and which of them there are already.

Beside the file lies FILE.options.json, which says how it was made. It is there before the first row, so a file without
it was not made here and is left alone.
"""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from codec_jax.nnx import Completion


class ResultFile:
    """A file of completions, open for more. `finished` holds the requests it has: prompt * samples + sample."""

    def __init__(self, file: Path, options: dict[str, Any], prompts: int, samples: int) -> None:
        """Open the file, or make it if there is none, and drop a last line that an interruption tore.

        `options` are what the rows depend on, as JSON values. Raises ValueError, and leaves the file as it was, if it
        was made with other options or by another command, if it has lines that are not rows of these prompts, or if
        another run is writing it.
        """
        self._prompts, self._samples = prompts, samples
        self.finished: set[int] = set()
        self._out = file.open("ab+")
        try:
            _lock(self._out, file)
            beside = file.with_name(file.name + ".options.json")
            if self._out.tell():
                _check_options(file, beside, options)
                self._out.truncate(self._read(file))
            else:
                draft = beside.with_name(beside.name + ".part")
                draft.write_text(json.dumps(options, indent=2) + "\n", "utf-8")
                draft.replace(beside)
        except BaseException:
            self._out.close()
            raise

    def write(self, request: int, text: str | None, completion: Completion) -> None:
        """Append one row."""
        prompt, sample = divmod(request, self._samples)
        row: dict[str, Any] = {"prompt": prompt}
        if self._samples > 1:
            row["sample"] = sample
        row |= {
            "text": text,
            "tokens": completion.tokens,
            "logprobs": completion.logprobs,
            "finish_reason": completion.finish_reason,
        }
        line = json.dumps(row, ensure_ascii=False, allow_nan=False)
        self._out.write(line.encode("utf-8") + b"\n")
        self._out.flush()
        self.finished.add(request)

    def __enter__(self) -> ResultFile:
        """Return the file."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self._out.close()

    def _read(self, file: Path) -> int:
        """Collect the finished requests; returns how many bytes whole lines take."""
        self._out.seek(0)
        whole, problems = 0, []
        for number, line in enumerate(self._out, 1):
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            request = self._request(line)
            if request is None:
                problems.append(f"line {number}: no row of these prompts")
            elif request in self.finished:
                problems.append(f"line {number}: a completion that an earlier line has")
            else:
                self.finished.add(request)
        if problems:
            raise ValueError(
                "\n  ".join(
                    [
                        f"{file}: expected rows that this command wrote; restore them or name another --output:",
                        *problems,
                    ]
                )
            )
        return whole

    def _request(self, line: bytes) -> int | None:
        try:
            row = json.loads(line)
            prompt, sample = row["prompt"], row["sample"] if self._samples > 1 else 0
        except (ValueError, TypeError, LookupError):
            return None
        known = type(prompt) is type(sample) is int and 0 <= prompt < self._prompts and 0 <= sample < self._samples
        return prompt * self._samples + sample if known else None


def _lock(out: BinaryIO, file: Path) -> None:
    """Keep other runs away until the file is closed."""
    try:
        fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"{file}: expected a file that nobody writes to, but another run is at it") from error


def _check_options(file: Path, beside: Path, options: dict[str, Any]) -> None:
    """Raise ValueError unless the rows that are there were made with these options."""
    try:
        made_with = json.loads(beside.read_text("utf-8"))
        changed = [name for name in {**made_with, **options} if made_with.get(name) != options.get(name)]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file}: expected a new file, or one that {beside.name} says the options of, got one without; "
            f"name another --output ({error})"
        ) from error
    if changed:
        differences = [f"{name}: {made_with.get(name)!r}, now {options.get(name)!r}" for name in changed]
        raise ValueError(
            "\n  ".join([f"{file}: made with other options; repeat them or name another --output:", *differences])
        )
