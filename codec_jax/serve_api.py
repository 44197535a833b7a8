"""What OpenAI's completions API says, as the engine's values and back: a body is read, an answer is written.

https://platform.openai.com/docs/api-reference; top_k, min_p, repetition_penalty, stop_token_ids and
chat_template_kwargs are vLLM's. A field that is not served is refused, so that nobody believes it had an effect.
"""

from __future__ import annotations

import json
import re
import secrets
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

from tokenizers import Tokenizer

from codec_jax import checks
from codec_jax.nnx.calls import naming_prompt
from codec_jax.nnx.checkpoint import Checkpoint
from codec_jax.nnx.params import SamplingParams, check_stop_tokens
from codec_jax.nnx.replicas import Serving
from codec_jax.nnx.request import Request, Update
from codec_jax.nnx.text import AddedText, added_texts, special_tokens, token_ids

#: Answers that one body may ask for.
MAX_SAMPLES, MAX_ANSWERS = 128, 2048
_IGNORED = ("user", "metadata", "store")
#: What fields may say although they are not served, for it asks for nothing.
_NEUTRAL = {"echo": False, "best_of": 1, "suffix": "", "tools": [], "response_format": {"type": "text"}}
_SAME = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
#: Names that the engine has -> those of fields, where they differ, by whether it is a chat.
_FIELDS = {
    False: {"stop_tokens": "stop_token_ids", "top_logprobs": "logprobs"},
    True: {"stop_tokens": "stop_token_ids", "prompt": "messages"},
}


class Refused(Exception):
    """A call that is answered with an error."""

    def __init__(self, status: int, message: str, field: str | None = None) -> None:
        """Keep what OpenAI's error object says.

        Args:
          status: of HTTP.
          message: for people.
          field: of the body, that is wrong.
        """
        super().__init__(message)
        self.status, self.field = status, field

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.field, "code": None}}


@dataclass(frozen=True)
class Served:
    """The model that is served."""

    name: str  # in calls
    checkpoint: Checkpoint
    max_context: int  # tokens of a request

    @cached_property
    def special_tokens(self) -> frozenset[int]:
        """Those of the tokenizer that texts do not have."""
        return special_tokens(self.checkpoint.tokenizer)


@dataclass(frozen=True)
class Call:
    """What a body asks for."""

    chat: bool
    prompts: list[tuple[list[int], SamplingParams]]
    samples: int
    stream: bool
    include_usage: bool
    logprobs: bool

    def submit(self, engine: Serving) -> list[Request]:
        """Submit all samples of all prompts, or none.

        Args:
          engine: the one to submit to.

        Raises what `Engine.submit` raises.
        """
        requests: list[Request] = []
        try:
            for i, (prompt, params) in enumerate(self.prompts):
                with naming_prompt(f"prompt[{i}]" if len(self.prompts) > 1 else "prompt"):
                    requests += engine.submit_samples(prompt, self.samples, params)
        except ValueError:
            for request in requests:
                engine.abort(request)
            raise
        return requests


# ---------------------------------------------------------------------- bodies


def refusal(error: ValueError, chat: bool) -> Refused:
    """Return the answer to a body that is wrong.

    Args:
      error: begins with the name of what is wrong.
      chat: whether the body was one of a chat.
    """
    name = str(error).partition(":")[0].partition("[")[0]
    field = _FIELDS[chat].get(name, name)
    return Refused(400, field + str(error)[len(name) :], field)


def read_call(content: bytes, chat: bool, served: Served) -> Call:
    """Read the body of a call.

    Args:
      content: JSON.
      chat: whether it is one of a chat.
      served: the model.

    Raises Refused for a model or a field that is not served, ValueError that begins with what else is wrong.
    """
    fields = {
        name: value
        for name, value in _json_object(content).items()
        if value is not None and name not in _IGNORED and not _is_neutral(name, value)
    }
    if (model := fields.pop("model", None)) != served.name:
        raise Refused(404, f"model: expected {served.name!r}, got {model!r:.100}", "model")
    stream, options = _boolean("stream", fields.pop("stream", False)), fields.pop("stream_options", {})
    if options != {} and not (stream and isinstance(options, dict) and options.keys() == {"include_usage"}):
        raise ValueError(f"stream_options: expected include_usage only, and stream beside it, got {options!r:.100}")
    usage = options.get("include_usage")
    usage = usage is not None and _boolean("stream_options: include_usage", usage)
    samples = checks.integer("n", fields.pop("n", 1), below=MAX_SAMPLES + 1)
    prompts = [_chat(fields, served)] if chat else _prompts(fields.pop("prompt", None), served.checkpoint.tokenizer)
    if len(prompts) * samples > MAX_ANSWERS:
        raise ValueError(
            f"prompt: expected at most {MAX_ANSWERS} answers, got {len(prompts)} prompts with n = {samples}"
        )
    newer, older = fields.pop("max_completion_tokens", None), fields.pop("max_tokens", None)
    limit, of = (older, "max_tokens") if newer is None else (newer, "max_completion_tokens")
    seed = fields.pop("seed", None)
    if seed is not None:
        seed = checks.integer("seed", seed, -(2**63), 2**63) % 2**32
    logprobs, params = _sampling(fields, chat, served)
    if fields:
        name, value = next(iter(fields.items()))
        raise Refused(400, f"{name}: expected no such field, for it is not supported, got {repr(value)[:100]}", name)
    requests = []
    for i, prompt in enumerate(prompts):
        left = served.max_context - len(prompt)
        if limit is None and left < 1:
            name = "messages" if chat else "prompt" if len(prompts) == 1 else f"prompt[{i}]"
            raise ValueError(f"{name}: expected fewer than {served.max_context} tokens, got {len(prompt)}")
        tokens = (left if chat else min(left, 16)) if limit is None else checks.integer(of, limit)
        drawn = secrets.randbits(32) if seed is None else seed
        requests.append((prompt, SamplingParams(max_tokens=tokens, seed=drawn, stream=i * samples, **params)))
    return Call(chat, requests, samples, stream, usage, logprobs)


def _json_object(content: bytes) -> dict[str, Any]:
    try:
        body = json.loads(content)
        json.dumps(body, ensure_ascii=False).encode("utf-8")  # escapes may have made half a character of UTF-16
    except (ValueError, RecursionError) as error:
        raise ValueError(f"body: expected JSON, got {error}") from error
    if not isinstance(body, dict):
        raise ValueError(f"body: expected a JSON object, got {repr(body)[:100]}")
    return body


def _is_neutral(name: str, value: Any) -> bool:
    """Whether a field asks for nothing; True is no 1 and False no 0, which they equal."""
    return name in _NEUTRAL and value == _NEUTRAL[name] and isinstance(value, bool) == isinstance(_NEUTRAL[name], bool)


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected true or false, got {repr(value)[:100]}")
    return value


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _prompts(given: Any, tokenizer: Tokenizer) -> list[list[int]]:
    """Return the token ids of a text, several texts, a list of token ids, or several of these."""
    several = given if isinstance(given, list) and not _is_tokens(given) else [given]
    prompts = [token_ids("prompt", prompt, tokenizer) if isinstance(prompt, str) else prompt for prompt in several]
    if not all(map(_is_tokens, prompts)):
        raise ValueError("prompt: expected a string, a list of strings, token ids, or a list of lists of token ids")
    return prompts


def _chat(fields: dict[str, Any], served: Served) -> list[int]:
    """Return the token ids of a chat; parts of text are joined, as templates may know strings only."""
    messages, names = fields.pop("messages", None), fields.pop("chat_template_kwargs", {})
    if (template := served.checkpoint.chat_template) is None:
        raise ValueError(f"messages: expected no chat, for {served.name} has no chat template; use /v1/completions")
    if not isinstance(names, dict) or names.keys() & {"self", "tokenizer", "messages", "tools"}:
        raise ValueError(
            "chat_template_kwargs: expected an object of names, others than messages, tools, tokenizer and self, "
            f"got {repr(names)[:100]}"
        )
    joined = []
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        parts = message.get("content") if isinstance(message, dict) else None
        if isinstance(parts, list):
            if not all(map(_is_text, parts)):
                raise ValueError(f"messages[{i}]: expected parts of text only, got {repr(parts)[:100]}")
            message = {**message, "content": "".join(part["text"] for part in parts)}
        joined.append(message)
    return template.encode(served.checkpoint.tokenizer, joined or messages, **names)


def _sampling(fields: dict[str, Any], chat: bool, served: Served) -> tuple[bool, dict[str, Any]]:
    """Take what says how tokens are drawn; return whether log-probabilities are wanted, and parameters by name."""
    params = {name: fields.pop(name) for name in _SAME if name in fields}
    top_k = fields.pop("top_k", -1)
    if isinstance(top_k, bool) or top_k not in (-1, 0):  # vLLM's signs for all of them
        params["top_k"] = top_k
    stop, also, biases = fields.pop("stop", ()), fields.pop("stop_token_ids", []), fields.pop("logit_bias", {})
    params["stop"] = [stop] if isinstance(stop, str) else stop
    if not _is_tokens(also):
        raise ValueError(f"stop_token_ids: expected token ids, got {repr(also)[:100]}")
    check_stop_tokens("stop_token_ids", also, served.checkpoint.stop_tokens, served.checkpoint.config.vocab_size)
    params["stop_tokens"] = (*served.checkpoint.stop_tokens, *also)
    if not isinstance(biases, dict) or not all(re.fullmatch("0|[1-9][0-9]{0,9}", token) for token in biases):
        raise ValueError(f"logit_bias: expected token ids with numbers, got {repr(biases)[:100]}")
    params["logit_bias"] = {int(token): bias for token, bias in biases.items()}
    if not chat:
        return "logprobs" in fields, {**params, "top_logprobs": fields.pop("logprobs", 0)}
    logprobs = _boolean("logprobs", fields.pop("logprobs", False))
    likely = fields.pop("top_logprobs", 0)
    if not logprobs and (likely or isinstance(likely, bool)):
        raise ValueError("top_logprobs: expected logprobs beside it, got none")
    return logprobs, {**params, "top_logprobs": likely}


# ---------------------------------------------------------------------- answers


class Answer:
    """Writes what comes of a call."""

    def __init__(self, call: Call, served: Served, requests: Sequence[Request]) -> None:
        """Begin an answer.

        Args:
          call: what was asked for.
          served: the model.
          requests: those that were submitted.
        """
        self._call, self._tokenizer, self._requests = call, served.checkpoint.tokenizer, requests
        self._told = [(0, 0)] * len(requests)  # tokens, and characters of those with log-probabilities
        self._special = served.special_tokens
        prefix, kind = ("chatcmpl", "chat.completion") if call.chat else ("cmpl", "text_completion")
        kind += ".chunk" if call.chat and call.stream else ""
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time())}
        self._head["model"] = served.name

    def whole(self) -> dict[str, Any]:
        """Return the answer, once all requests are finished."""
        updates = [Update(request.tokens, request.text, request.finish_reason) for request in self._requests]
        return {**self._head, "choices": list(map(self._choice, count(), updates)), "usage": self._usage()}

    def chunks(self, number: int, update: Update) -> list[dict[str, Any]]:
        """Return a chunk, or none if there is nothing to tell yet.

        Args:
          number: of the request.
          update: what is new of it.
        """
        if not (update.text or update.finish_reason or self._call.logprobs):
            return []
        usage = {"usage": None} if self._call.include_usage else {}
        return [{**self._head, "choices": [self._choice(number, update)], **usage}]

    def last_chunks(self) -> list[dict[str, Any]]:
        """Return the chunk of usage, if it was asked for."""
        return [{**self._head, "choices": [], "usage": self._usage()}] if self._call.include_usage else []

    def _choice(self, number: int, update: Update) -> dict[str, Any]:
        begin, characters = self._told[number]
        logprobs = None
        if self._call.logprobs:
            logprobs, characters = self._logprobs(number, range(begin, begin + len(update.tokens)), characters)
        self._told[number] = begin + len(update.tokens), characters
        choice = {"index": number, "logprobs": logprobs, "finish_reason": update.finish_reason}
        if not self._call.chat:
            return {**choice, "text": update.text}
        speaker = {} if begin else {"role": "assistant"}
        return {**choice, "delta" if self._call.stream else "message": {**speaker, "content": update.text}}

    def _usage(self) -> dict[str, Any]:
        prompts = self._requests[:: self._call.samples]  # samples have theirs in common
        given = sum(len(request.prompt) for request in prompts)
        generated = sum(len(request.tokens) for request in self._requests)
        return {
            "prompt_tokens": given,
            "completion_tokens": generated,
            "total_tokens": given + generated,
            "prompt_tokens_details": {"cached_tokens": sum(request.cached_tokens for request in prompts)},
        }

    def _logprobs(self, number: int, tokens: range, characters: int) -> tuple[dict[str, Any], int]:
        """Write log-probabilities in the way of either API; return them and the characters up to there."""
        request = self._requests[number]
        chosen, tops, offsets = [], [], []
        for at in tokens:
            [likely] = request.top_logprobs[at : at + 1] or [{}]
            one, *others = added_texts(self._tokenizer, request.tokens, at, [request.tokens[at], *likely])
            chosen.append((one, request.logprobs[at]))
            tops.append(list(zip(others, likely.values(), strict=True)))
            offsets.append(characters)
            if request.tokens[at] not in self._special:  # which the text does not have
                characters += one.characters
        pairs = list(zip(chosen, tops, strict=True))
        if self._call.chat:
            content = [{**_entry(*one), "top_logprobs": [_entry(*each) for each in top]} for one, top in pairs]
            return {"content": content, "refusal": None}, characters
        return {
            "tokens": [added.text for added, _ in chosen],
            "token_logprobs": [_finite(logprob) for _, logprob in chosen],
            "top_logprobs": [{added.text: _finite(logprob) for added, logprob in [*top, one]} for one, top in pairs],
            "text_offset": offsets,
        }, characters


def _entry(added: AddedText, logprob: float) -> dict[str, Any]:
    """Write a token of a chat, and its bytes, which may be a part of a character."""
    return {
        "token": added.text,
        "logprob": _finite(logprob),
        "bytes": None if added.bytes is None else [*added.bytes],
    }


def _finite(logprob: float) -> float:
    """Return what OpenAI writes for tokens that are impossible, as JSON has no infinity."""
    return max(logprob, -9999.0)
