"""Prompts and answers as text: stop strings, and a grammar that llguidance holds a request to."""

import re

import llguidance
import pytest
from cases import VOCAB, Setup
from engines import greedy, make_engine, run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from codec_jax.nnx.engine import Engine
from codec_jax.nnx.params import SamplingParams

#: A token for each of these characters, and one that ends a text.
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,:;-+*/={}"[: VOCAB - 1]
END = VOCAB - 1


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    names = {" ": "Ġ"}
    vocabulary = {names.get(character, character): i for i, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    assert tokenizer.token_to_id("</s>") == END
    return tokenizer


@pytest.fixture(scope="module")
def engine(setup: Setup, tokenizer: Tokenizer) -> Engine:
    return make_engine(setup.dense.model, tokenizer=tokenizer)


def test_text_is_that_of_the_tokens(engine: Engine, tokenizer: Tokenizer) -> None:
    pieces: list[str] = []
    request = engine.submit("a long day", greedy(30), on_update=lambda _, update: pieces.append(update.text))
    run(engine)
    assert request.prompt.tolist() == tokenizer.encode("a long day").ids
    assert "".join(pieces) == request.text == tokenizer.decode(request.tokens)
    streamed = [update.text for update in engine.stream(engine.submit("a long day", greedy(30)))]
    assert "".join(streamed) == request.text


def test_stop_strings_end_a_text_before_they_begin(engine: Engine, tokenizer: Tokenizer) -> None:
    [whole] = engine.generate(["a long day"], greedy(40))
    for begin, size in ((3, 2), (10, 1), (17, 5)):
        stop = whole.text[begin : begin + size]
        [request] = engine.generate(["a long day"], greedy(40, stop=[stop, "never said"]))
        assert request.finish_reason == "stop"
        assert request.text == whole.text[: whole.text.index(stop)]
        assert tokenizer.decode(request.tokens) == whole.text[: whole.text.index(stop) + size]
        assert len(request.logprobs) == len(request.tokens)


def test_a_fork_that_begins_with_a_stop_string_gets_nothing_more(engine: Engine, tokenizer: Tokenizer) -> None:
    [source] = engine.generate(["a long day"], greedy(20))
    stop = source.text[8:10]
    fork = engine.fork(source, greedy(40, stop=[stop]))
    run(engine)
    assert (fork.finish_reason, fork.tokens) == ("stop", source.tokens)
    assert fork.text == source.text[: source.text.index(stop)]


def test_a_grammar_holds_each_sample_to_it(engine: Engine, tokenizer: Tokenizer) -> None:
    pattern = r"(ab|cd){1,3}-[0-9]{2,6}"
    tokens = llguidance.LLTokenizer(tokenizer.to_str(), eos_token=END)
    matcher = llguidance.LLMatcher(tokens, llguidance.LLMatcher.grammar_from_regex(pattern))
    params = SamplingParams(max_tokens=20, temperature=2.0, matcher=matcher, stop_tokens=[END])
    free = engine.submit("what", greedy(20))
    requests = engine.submit_samples("what", 8, params)
    run(engine)
    assert all(re.fullmatch(pattern, request.text) for request in requests), requests
    assert len({request.text for request in requests}) > 1
    assert {request.finish_reason for request in requests} == {"stop"}
    assert free.tokens == engine.generate(["what"], greedy(20))[0].tokens
