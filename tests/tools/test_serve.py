"""The server, by OpenAI's own client and by raw bytes: what it answers and refuses, and clients that go away."""

import asyncio
import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest
from checkpoints import write_checkpoint
from small_checkpoints import dense_logits
from starlette.types import Message
from tokenizers import Tokenizer, models

from codec_jax import serve
from codec_jax.nnx import Engine, Request, SamplingParams, open_checkpoint
from codec_jax.serve_api import MAX_ANSWERS, MAX_SAMPLES, Answer, Call, Refused, Served

VOCAB, STOP, CONTEXT, REQUESTS, KEY = 40, 5, 128, 8, "a key of ours"
RNG = np.random.default_rng(0)
DOCUMENT = RNG.integers(6, VOCAB, 40).tolist()
PROMPTS = [[*DOCUMENT[: 40 - i % 5], *RNG.integers(6, VOCAB, 1 + i % 4).tolist()] for i in range(200)]
GREEDY: dict[str, Any] = {"model": "small", "temperature": 0.0, "max_tokens": 12}
USER = {"role": "user", "content": "w8 w9"}
IMAGE = {"type": "image_url", "text": "w8", "image_url": {"url": "data:"}}


def text(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "small"
    directory.mkdir()
    write_checkpoint(directory, "llama", vocab_size=VOCAB, stop=STOP, max_context=CONTEXT, deviation=1.0, seed=2)
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}w6 {{ m.content }} {% endif %}{% endfor %}w{{ last or 7 }}"
    )
    (directory / "chat_template.jinja").write_text(template)
    return directory


class Running(NamedTuple):
    process: subprocess.Popen
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, **{"api_key": KEY, "max_retries": 0, **options})

    def get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", path)
        response = connection.getresponse()
        found = response.status, response.read().decode()
        connection.close()
        return found

    def post(self, body: bytes, path: str = "/v1/completions", **headers: str) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", path, body, {"Authorization": f"Bearer {KEY}", **headers})
        response = connection.getresponse()
        found = response.status, json.loads(response.read())
        connection.close()
        return found

    def metrics(self) -> dict[str, float]:
        status, lines = self.get("/metrics")
        assert status == 200
        pairs = [line.rsplit(" ", 1) for line in lines.splitlines() if not line.startswith("#")]
        return {name.removeprefix("codec_jax_"): float(value) for name, value in pairs}


@contextmanager
def running(model_dir: Path, cache: Path, replicas: int = 1) -> Iterator[Running]:
    """The command, until it is ended; what it compiles is kept for the next one."""
    options = {"--model": model_dir, "--port": 0, "--dtype": "float32", "--max-requests": REQUESTS}
    options |= {"--kv-cache-gib": 0.002, "--prefill-tokens": 128, "--data-parallel": replicas}
    command = [sys.executable, "-m", "codec_jax.serve", *(str(part) for pair in options.items() for part in pair)]
    kept = {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    log = model_dir.parent / f"{time.monotonic_ns()}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stderr=file,
            stdout=file,
            env={**os.environ, **kept, "CODEC_JAX_API_KEY": KEY, "JAX_NUM_CPU_DEVICES": str(replicas)},
        )
    try:
        while not (port := re.search(r"running on http://127\.0\.0\.1:(\d+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield Running(process, int(port[1]))
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def server(model_dir: Path, cache: Path) -> Iterator[Running]:
    with running(model_dir, cache) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def alone(model_dir: Path) -> list[list[int]]:
    """The greedy tokens of every prompt, up to a stop token, from the whole context each time."""
    model = open_checkpoint(model_dir).load(jnp.float32)
    contexts = np.zeros((len(PROMPTS), 64), np.int32)
    lengths = np.array([len(prompt) for prompt in PROMPTS])
    for row, prompt in enumerate(PROMPTS):
        contexts[row, : len(prompt)] = prompt
    rows = np.arange(len(PROMPTS))
    for _ in range(12):
        contexts[rows, lengths] = dense_logits(model, contexts)[rows, lengths - 1].argmax(axis=-1)
        lengths += 1
    found = [contexts[row, length - 12 : length].tolist() for row, length in zip(rows, lengths, strict=True)]
    return [tokens[: tokens.index(STOP) + 1] if STOP in tokens else tokens for tokens in found]


def visible(tokens: list[int]) -> str:
    return text([token for token in tokens if token != STOP])


# --- Answers -----------------------------------------------------------------------------------------------------


def test_completions_are_those_of_the_model(client: openai.OpenAI, alone: list[list[int]]) -> None:
    for prompt in (PROMPTS[0], text(PROMPTS[0]), [PROMPTS[0]], [text(PROMPTS[0])]):
        answer = client.completions.create(**GREEDY, prompt=prompt)
        assert answer.object == "text_completion"
        assert answer.model == "small"
        [choice] = answer.choices
        assert choice.text == visible(alone[0])
        assert choice.finish_reason == ("stop" if STOP in alone[0] else "length")
        assert answer.usage.prompt_tokens == len(PROMPTS[0])
        assert answer.usage.completion_tokens == len(alone[0])
        assert answer.usage.total_tokens == len(PROMPTS[0]) + len(alone[0])
    assert answer.usage.prompt_tokens_details.cached_tokens >= 32  # of the calls before


def test_several_prompts_have_n_choices_each(client: openai.OpenAI, alone: list[list[int]]) -> None:
    answer = client.completions.create(**GREEDY, prompt=PROMPTS[:3], n=2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == [visible(alone[i // 2]) for i in range(6)]
    assert answer.usage.prompt_tokens == sum(map(len, PROMPTS[:3]))
    assert answer.usage.completion_tokens == 2 * sum(map(len, alone[:3]))


def test_chats_go_through_the_template(client: openai.OpenAI) -> None:
    plain = client.completions.create(**GREEDY, prompt="w6 w8 w9 w7").choices[0].text
    messages = [{"role": "system", "content": "w1"}, USER]
    answer = client.chat.completions.create(**GREEDY, messages=messages, user="me", metadata={"a": "b"}, store=False)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == plain
    parts = [{"role": "user", "content": [{"type": "text", "text": "w8 "}, {"type": "text", "text": "w9"}]}]
    assert client.chat.completions.create(**GREEDY, messages=parts).choices[0].message.content == plain
    other = client.chat.completions.create(**GREEDY, messages=[USER], extra_body={"chat_template_kwargs": {"last": 11}})
    expected = client.completions.create(**GREEDY, prompt="w6 w8 w9 w11")
    assert other.choices[0].message.content == expected.choices[0].text


def test_a_chat_may_take_the_rest_of_the_context(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "small", "messages": [USER], "logit_bias": {str(STOP): -100}}
    answer = client.chat.completions.create(**options)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == CONTEXT
    assert client.chat.completions.create(**options, max_completion_tokens=3).usage.completion_tokens == 3
    short = client.completions.create(model="small", prompt=[1], logit_bias={str(STOP): -100})
    assert short.usage.completion_tokens == 16


@pytest.mark.parametrize("options", [{}, {"n": 3, "stop": ["w8 w", "w31"]}, {"logprobs": True, "top_logprobs": 2}])
def test_streams_of_chats_add_up_to_what_comes_at_once(client: openai.OpenAI, options: dict[str, Any]) -> None:
    call = {**GREEDY, "temperature": 1.0, "seed": 7, "max_tokens": 30, "messages": [USER], **options}
    answer = client.chat.completions.create(**call)
    chunks = list(client.chat.completions.create(**call, stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    for choice in answer.choices:
        own = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == choice.index]
        assert [one.delta.role for one in own] == ["assistant"] + [None] * (len(own) - 1)
        assert "".join(one.delta.content for one in own) == choice.message.content
        assert [one.finish_reason for one in own] == [None] * (len(own) - 1) + [choice.finish_reason]
        if options.get("logprobs"):
            assert [token for one in own for token in one.logprobs.content] == choice.logprobs.content


def test_streams_of_completions_add_up_to_what_comes_at_once(client: openai.OpenAI) -> None:
    call = {**GREEDY, "temperature": 1.0, "seed": 7, "max_tokens": 30, "prompt": PROMPTS[:2], "n": 2, "logprobs": 2}
    answer = client.completions.create(**call)
    chunks = list(client.completions.create(**call, stream=True))
    assert len(chunks) > 4
    for choice in answer.choices:
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert "".join(one.text for one in own) == choice.text
        assert own[-1].finish_reason == choice.finish_reason
        for field in ("tokens", "text_offset"):
            assert [x for one in own for x in getattr(one.logprobs, field)] == getattr(choice.logprobs, field)
        # What is drawn beside a chunk of a prompt is drawn by another program, which may round otherwise.
        logprobs = [x for one in own for x in one.logprobs.token_logprobs]
        assert logprobs == pytest.approx(choice.logprobs.token_logprobs, abs=1e-5)
        most = [x for one in own for x in one.logprobs.top_logprobs]
        for got, want in zip(most, choice.logprobs.top_logprobs, strict=True):
            assert got == pytest.approx(want, abs=1e-5)


def test_offsets_are_those_of_a_text_without_special_tokens() -> None:
    tokenizer = Tokenizer(models.WordLevel({"one": 0, "two": 1}))
    tokenizer.add_special_tokens(["<end of thinking>"])
    params = SamplingParams(max_tokens=4, top_logprobs=1)
    request = Request(0, np.array([0]), params, tokens=[0, 2, 2, 1], logprobs=[-1.0] * 4, text="one two")
    call = Call(chat=False, prompts=[([0], params)], samples=1, stream=False, include_usage=False, logprobs=True)
    served = Served("small", SimpleNamespace(tokenizer=tokenizer), CONTEXT)
    [choice] = Answer(call, served, [request]).whole()["choices"]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert offsets == [0, 3, 3, 3]
    assert [choice["text"][offsets[i] :].startswith(tokens[i]) for i in (0, 3)] == [True, True]


def test_samples_differ_and_seeds_repeat_them(client: openai.OpenAI) -> None:
    call: dict[str, Any] = {"model": "small", "prompt": [[9], [9]], "max_tokens": 20, "n": 3}
    call["logit_bias"] = {str(STOP): -100}  # or texts may be the same for being empty

    def texts(**options: Any) -> list[str]:
        return [choice.text for choice in client.completions.create(**call, **options).choices]

    first = texts(seed=-3)
    assert first == texts(seed=-3)
    assert len(set(first)) == 6
    assert texts()[0] != texts()[0]


def test_texts_end_before_stop_strings_and_at_stop_tokens(client: openai.OpenAI, alone: list[list[int]]) -> None:
    tokens = alone[0]
    stop = f"w{tokens[3]} w{tokens[4]}"
    expected = visible(tokens)[: visible(tokens).index(stop)]
    for given in (stop, ["w99", stop]):
        answer = client.completions.create(**GREEDY, prompt=PROMPTS[0], stop=given)
        assert answer.choices[0].text == expected
        assert answer.choices[0].finish_reason == "stop"
    answer = client.completions.create(**GREEDY, prompt=PROMPTS[0], extra_body={"stop_token_ids": [tokens[3]]})
    assert answer.choices[0].text == text(tokens[: tokens.index(tokens[3])])
    assert answer.usage.completion_tokens == tokens.index(tokens[3]) + 1


def test_log_probabilities_are_those_of_the_model(
    client: openai.OpenAI, alone: list[list[int]], model_dir: Path
) -> None:
    prompt, tokens = PROMPTS[0], alone[0]
    logits = dense_logits(open_checkpoint(model_dir).load(jnp.float32), np.asarray([[*prompt, *tokens]]))[0]
    logits = logits[len(prompt) - 1 : -1].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    found = client.completions.create(**GREEDY, prompt=prompt, logprobs=3).choices[0].logprobs
    names = [("" if i == 0 else " ") + f"w{token}" for i, token in enumerate(tokens)]
    assert found.tokens == names
    assert found.text_offset == [len("".join(names[:i])) for i in range(len(names))]
    np.testing.assert_allclose(found.token_logprobs, expected[np.arange(len(tokens)), tokens], atol=1e-4)
    for row, top in zip(expected, found.top_logprobs, strict=True):
        likely = np.argsort(-row)[:3]
        assert [name.strip() for name in top] == [f"w{token}" for token in likely]
        np.testing.assert_allclose(list(top.values()), row[likely], atol=1e-4)
    chat = client.chat.completions.create(**GREEDY, messages=[USER], logprobs=True, top_logprobs=1)
    content = chat.choices[0].logprobs.content
    assert "".join(entry.token for entry in content).startswith(chat.choices[0].message.content)
    assert [bytes(entry.bytes).decode() for entry in content] == [entry.token for entry in content]
    assert [entry.top_logprobs[0].logprob for entry in content] == [entry.logprob for entry in content]  # greedy


def test_every_option_reaches_the_engine(client: openai.OpenAI) -> None:
    call: dict[str, Any] = {"model": "small", "prompt": [9], "max_tokens": 24, "seed": 1}
    plain = client.completions.create(**call).choices[0].text
    greedy = client.completions.create(**{**GREEDY, **call}).choices[0].text
    for only in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert client.completions.create(**call, extra_body=only).choices[0].text == greedy != plain
    assert client.completions.create(**call, extra_body={"top_k": -1}).choices[0].text == plain
    for changed in (
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"extra_body": {"repetition_penalty": 3.0}},
        {"logit_bias": {"11": 50.0}},
    ):
        assert client.completions.create(**{**GREEDY, **call}, **changed).choices[0].text != greedy


async def complete_all(server: Running, alone: list[list[int]]) -> None:
    async def one(client: openai.AsyncOpenAI, prompt: list[int]) -> str:
        stream = await client.completions.create(**GREEDY, prompt=prompt, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async with openai.AsyncOpenAI(base_url=server.url, api_key=KEY, max_retries=0) as client:
        found = await asyncio.gather(*(one(client, prompt) for prompt in PROMPTS))
    assert found == [visible(tokens) for tokens in alone]


def test_200_streams_at_a_time_have_what_they_have_alone(server: Running, alone: list[list[int]]) -> None:
    before = server.metrics()
    asyncio.run(complete_all(server, alone))
    after = server.metrics()
    grown = {name: after[name] - before[name] for name in after}
    ended = [grown[f'requests_total{{finish_reason="{reason}"}}'] for reason in ("stop", "length")]
    assert sum(ended) == 200
    assert grown["generated_tokens_total"] >= sum(map(len, alone))
    assert grown["cached_tokens_total"] > grown["prompt_tokens_total"] / 2
    assert grown["time_to_first_token_seconds_count"] == 200
    assert grown["time_between_tokens_seconds_count"] <= sum(map(len, alone)) - 200
    assert after["running"] == after["waiting"] == 0


@pytest.mark.skipif(jax.default_backend() == "gpu" and len(jax.devices()) < 2, reason="needs two devices")
def test_replicas_answer_as_one_does(model_dir: Path, cache: Path, alone: list[list[int]]) -> None:
    with running(model_dir, cache, replicas=2) as server:
        asyncio.run(complete_all(server, alone))
        found = server.metrics()
    assert found["prompt_tokens_total"] == sum(len(prompt) - 1 for prompt in PROMPTS)
    assert found["running"] == found["waiting"] == 0


# --- Refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "field", "expected"),
    [
        ({"temperature": -1}, "temperature", "at least 0"),
        ({"temperature": "hot"}, "temperature", "finite number"),
        ({"temperature": 10**400}, "temperature", "finite number"),
        ({"top_p": 0}, "top_p", "(0, 1]"),
        ({"top_k": 1.5}, "top_k", "integer"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": CONTEXT}, "prompt", f"max_context = {CONTEXT}"),
        ({"n": MAX_SAMPLES + 1}, "n", f"below {MAX_SAMPLES + 1}"),
        ({"n": True}, "n", "integer"),
        ({"prompt": [[1]] * 50, "n": 41}, "prompt", f"at most {MAX_ANSWERS} answers"),
        ({"prompt": None}, "prompt", "a string"),
        ({"prompt": []}, "prompt", "at least one token"),
        ({"prompt": [VOCAB]}, "prompt", f"tokens in [0, {VOCAB})"),
        ({"prompt": [True]}, "prompt", "a string"),
        ({"prompt": [[1], "w1", 2]}, "prompt", "a string"),
        ({"prompt": ["w1", ""]}, "prompt", "prompt[1]: expected at least one token"),
        ({"prompt": [[1], [2, VOCAB]]}, "prompt", f"got prompt[1][1] = {VOCAB}"),
        ({"prompt": [1] * CONTEXT}, "prompt", f"fewer than {CONTEXT} tokens, got {CONTEXT}"),
        ({"prompt": [[1], [1] * CONTEXT]}, "prompt", f"prompt[1]: expected fewer than {CONTEXT} tokens, got {CONTEXT}"),
        ({"stop": [1]}, "stop", "strings"),
        ({"stop": ""}, "stop", "none of them empty"),
        ({"stop_token_ids": ["w1"]}, "stop_token_ids", "token ids"),
        ({"stop_token_ids": [1, VOCAB]}, "stop_token_ids", f"tokens in [0, {VOCAB}), got stop_token_ids[1] = {VOCAB}"),
        ({"stop_token_ids": [1] * 16}, "stop_token_ids", "at most 15 tokens beside the model's 1, got 16"),
        ({"seed": 1.5}, "seed", "integer"),
        ({"stop": [f"x{i}" for i in range(65)]}, "stop", "at most 64 strings, got 65"),
        ({"logit_bias": {"w1": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"1": "x"}}, "logit_bias", "finite number"),
        ({"logit_bias": []}, "logit_bias", "token ids"),
        ({"logit_bias": {"1": 5, "01": -100}}, "logit_bias", "token ids"),
        ({"max_completion_tokens": 0, "max_tokens": 5}, "max_completion_tokens", "at least 1, got 0"),
        ({"top_k": False}, "top_k", "integer"),
        ({"logprobs": 21}, "logprobs", "below 21"),
        ({"logprobs": True}, "logprobs", "integer"),
        ({"stream": 1}, "stream", "true or false"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream beside it"),
        ({"stream": True, "stream_options": []}, "stream_options", "include_usage only"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options", "include_usage only"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options", "include_usage: expected true"),
        ({"echo": True}, "echo", "not supported"),
        ({"suffix": "w1"}, "suffix", "not supported"),
        ({"echo": 0}, "echo", "not supported"),
        ({"best_of": 2}, "best_of", "not supported"),
        ({"best_of": True}, "best_of", "not supported"),
        ({"messages": [USER]}, "messages", "not supported"),
        ({"top_logprobs": 1}, "top_logprobs", "not supported"),
        ({"something": 0}, "something", "not supported"),
    ],
)
def test_a_field_that_is_wrong_is_named(server: Running, changed: dict[str, Any], field: str, expected: str) -> None:
    status, answer = server.post(json.dumps({"model": "small", "prompt": [1, 2], **changed}).encode())
    assert status == 400, answer
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["param"] == field
    assert answer["error"]["message"].startswith(field)
    assert expected in answer["error"]["message"]


@pytest.mark.parametrize(
    ("changed", "field", "expected"),
    [
        ({"messages": None}, "messages", "at least one message, got None"),
        ({"messages": {"role": "user"}}, "messages", "at least one message, got {'role': 'user'}"),
        ({"messages": [1]}, "messages", "object"),
        ({"messages": [{"role": "user"}]}, "messages", "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "parts of text"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages", "parts of text"),
        ({"messages": [{"role": "user", "content": "w1 " * CONTEXT}]}, "messages", f"fewer than {CONTEXT} tokens"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs beside it"),
        ({"top_logprobs": False}, "top_logprobs", "logprobs beside it"),
        ({"logprobs": 2}, "logprobs", "true or false"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "below 21"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "names"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"prompt": "w1"}, "prompt", "not supported"),
    ],
)
def test_a_field_of_a_chat_that_is_wrong_is_named(
    server: Running, changed: dict[str, Any], field: str, expected: str
) -> None:
    body = json.dumps({"model": "small", "messages": [USER], **changed}).encode()
    status, answer = server.post(body, "/v1/chat/completions")
    assert status == 400, answer
    assert answer["error"]["param"] == field
    assert expected in answer["error"]["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff", b'{"model": "small", "prompt": "\\ud800"}', b"[" * 10**5, b"1" * 5000]
)
def test_a_body_that_is_no_json_is_refused(server: Running, body: bytes) -> None:
    status, answer = server.post(body)
    assert status == 400
    assert answer["error"]["message"].startswith("body: expected ")


def test_values_that_ask_for_nothing_are_as_none_at_all(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": None}
    call = {"model": "small", "temperature": 0, "max_tokens": 2}
    chunks = list(client.completions.create(**call, prompt=[1, 2], stream=True, stream_options=options))
    assert chunks
    assert all(chunk.usage is None for chunk in chunks)
    chat = client.chat.completions.create(**call, messages=[USER], top_logprobs=0)
    assert chat.choices[0].logprobs is None


def test_a_body_that_is_too_long_is_refused(server: Running, client: openai.OpenAI) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        connection.sendall(f"{head}Content-Length: {10**10}\r\n\r\n".encode())
        connection.sendall(b" " * (serve.MAX_BODY + 1))
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")
    client.completions.create(**GREEDY, prompt="w1")


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server would not end before."""

    class Stalled:
        async def stream(self) -> AsyncIterator[bytes]:
            yield b"{"
            await asyncio.sleep(60)

    monkeypatch.setattr(serve, "BODY_SECONDS", 0.05)
    with pytest.raises(Refused, match=r"body: expected all of it within 0\.05 s, got 1 bytes") as refused:
        asyncio.run(serve._read(Stalled()))
    assert refused.value.status == 408


def test_integers_of_any_length_are_what_they_are(server: Running, client: openai.OpenAI) -> None:
    first, second = (client.completions.create(**GREEDY, prompt="w1", seed=seed) for seed in (-(2**63), 2**63 - 1))
    assert first.choices[0].text == second.choices[0].text
    for field, number, message in (
        ("max_tokens", 10**30, f"and below 2147483648, got {10**30}"),
        ("seed", -(2**63) - 1, f"got {-(2**63) - 1}"),
        ("prompt", [10**23], f"prompt: expected integers below 2**31, got {10**23} to {10**23}"),
    ):
        status, answer = server.post(json.dumps({"model": "small", "prompt": "w1", field: number}).encode())
        assert status == 400
        assert message in answer["error"]["message"]


@pytest.mark.parametrize("sent", [b"\0\xff\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n"])
def test_what_is_no_http_is_refused(server: Running, client: openai.OpenAI, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
        connection.sendall(sent)
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")
    client.completions.create(**GREEDY, prompt="w1")


def test_clients_see_openais_errors(server: Running, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="model: expected 'small', got 'large'"):
        client.completions.create(model="large", prompt="w1")
    with pytest.raises(openai.BadRequestError, match="top_p: expected") as raised:
        client.chat.completions.create(model="small", messages=[USER], top_p=2.0)
    assert raised.value.param == "top_p"
    for key in ("another", KEY + "!"):
        with server.client(api_key=key) as other, pytest.raises(openai.AuthenticationError, match="API key"):
            other.models.list()
    for authorization in (KEY, "Bearer", "Bearer \xe4", f"Basic {KEY}"):
        assert server.post(b"{}", Authorization=authorization)[0] == 401
    assert server.post(b"{}", "/v1/nothing")[1]["error"]["message"] == "Not Found"
    assert server.get("/v1/completions")[0] == 405


def test_the_server_says_what_it_serves_and_how_it_is(server: Running, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["small"]
    assert server.get("/health") == (200, "")
    status, lines = server.get("/metrics")
    assert status == 200
    names = set(re.findall(r"^# TYPE (\w+) (?:counter|gauge|histogram)$", lines, re.MULTILINE))
    for line in lines.splitlines():
        if not line.startswith("#"):
            name, labels, value = re.fullmatch(r'(\w+?)((?:_bucket)?\{\w+="[^"]+"\}|_sum|_count|) (\S+)', line).groups()
            assert name in names, line
            assert float(value) >= 0.0, labels


# --- Clients that go away, and the end ---------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_the_request_of_a_client_that_went_away_is_aborted(server: Running, stream: bool) -> None:
    def aborted() -> float:
        return server.metrics()['requests_total{finish_reason="abort"}']

    before = aborted()
    call = {"model": "small", "messages": [USER], "n": 100, "stream": stream, "logit_bias": {str(STOP): -100}}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"Authorization": f"Bearer {KEY}"}
    connection.request("POST", "/v1/chat/completions", json.dumps(call), headers)
    if stream:
        assert connection.getresponse().read(20).startswith(b"data: {")
    else:
        while not server.metrics()["running"]:
            pass
    connection.close()
    while aborted() == before:
        time.sleep(0.01)
    found = server.metrics()
    assert found["running"] == found["waiting"] == 0


def test_a_signal_ends_the_server_after_what_runs(model_dir: Path, cache: Path) -> None:
    with running(model_dir, cache) as server, server.client() as client:
        call = {"model": "small", "messages": [USER], "logit_bias": {str(STOP): -100}}
        chunks = iter(client.chat.completions.create(**call, n=20, stream=True))
        found = [next(chunks)]
        server.process.send_signal(signal.SIGTERM)
        found += chunks
        assert [chunk.choices[0].finish_reason for chunk in found].count("length") == 20
        assert server.process.wait(60) == 0
        with pytest.raises(ConnectionRefusedError):
            server.get("/health")


def test_an_engine_that_failed_says_so(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(model_dir)
    engine = Engine(checkpoint.load(jnp.float32), max_requests=2, num_pages=16, tokenizer=checkpoint.tokenizer)

    def step() -> list:
        raise MemoryError("no more of it")

    monkeypatch.setattr(engine, "step", step)
    app = serve.make_app(engine, Served("small", checkpoint, CONTEXT))

    async def call(method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        sent: list[Message] = []
        received = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive() -> Message:
            return received.pop() if received else await asyncio.Event().wait()

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": []}
        await app(scope, receive, send)
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)

    async def main() -> None:
        async with app.router.lifespan_context(app):
            assert (await call("GET", "/health"))[0] == 200
            body = {"model": "small", "prompt": [1]}
            status, events = await call("POST", "/v1/completions", {**body, "stream": True})
            assert status == 200
            error, done = events.strip().split(b"\n\n")
            assert "no more of it" in json.loads(error.removeprefix(b"data: "))["error"]["message"]
            assert done == b"data: [DONE]"
            for method, path in (("POST", "/v1/completions"), ("GET", "/health"), ("GET", "/metrics")):
                status, answer = await call(method, path, body)
                assert status == 503
                assert json.loads(answer)["error"]["type"] == "server_error"

    asyncio.run(main())
    assert app.state.failed  # which the exit status of the command tells


# --- The command -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--model", "nowhere"], "--model: expected one with config.json"),
        (["--max-context", "1000"], f"--max-context: expected 1 to {CONTEXT}"),
        (["--max-context", str(CONTEXT), "--kv-cache-gib", "1e-5"], "--max-context: expected at most 80"),
        (["--api-key", ""], "--api-key: expected a key, got an empty one"),
        (["--kv-cache-gib", "1e-9"], "--kv-cache-gib: expected room for 1 to 134,217,727 pages of 16 tokens"),
        (["--kv-cache-gib", "1e6"], "--kv-cache-gib: expected room for 1 to 134,217,727 pages of 16 tokens"),
        (
            ["--invariant", "--context-parallel", "2"],
            "invariant: expected room = 1, ",
        ),
        (["--data-parallel", "1000"], "--data-parallel: expected at most the 8 devices that there are, got 1000"),
    ],
)
def test_options_that_are_wrong_are_refused(model_dir: Path, options: list[str], expected: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(expected)):
        serve.main(["--model", str(model_dir), "--port", "0", *options])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--port", "99999"], "--port: expected a port from 0 to 65535, got '99999'"),
        (["--kv-cache-gib", "nan"], "--kv-cache-gib: expected a positive number of GiB, got 'nan'"),
        (["--max-context", "0"], "--max-context: expected a positive whole number, got '0'"),
        (["--max-requests", "-3"], "--max-requests: expected a positive whole number, got '-3'"),
        (["--prefill-tokens", "0"], "--prefill-tokens: expected a positive whole number, got '0'"),
        (["--data-parallel", "0"], "--data-parallel: expected a positive whole number, got '0'"),
    ],
)
def test_numbers_out_of_their_range_are_refused(
    options: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        serve.main(["--model", "nowhere", *options])
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "host.invalid"])
def test_an_address_that_cannot_be_had_is_refused_before_a_model_is_loaded(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "_open", lambda _: pytest.fail("loads"))
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(SystemExit) as ended:
        serve.main(["--model", "nowhere", "--host", host, "--port", str(port := other.getsockname()[1])])
    assert f"expected an address of this machine where nobody listens, got {host}, port {port}" in str(ended.value)


def test_the_page_about_it_is_right(server: Running, capsys: pytest.CaptureFixture) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how_to" / "serve.md").read_text()
    [command] = re.findall(r"```sh\n(python -m codec_jax.serve.*?)```", page, re.DOTALL)
    options = serve._parse(shlex.split(command)[3:])
    [code] = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    assert f"http://127.0.0.1:{options.port}/v1" in code
    code = code.replace(f"http://127.0.0.1:{options.port}/v1", server.url).replace('"none"', repr(KEY))
    names: dict[str, Any] = {}
    exec(code.replace(options.model.name, "small"), names)
    names["client"].close()
    assert capsys.readouterr().out
