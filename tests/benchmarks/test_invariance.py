"""The benchmark that compares what is decoded in batches of different composition, on made-up texts."""

import numpy as np
import pytest

from benchmarks import invariance
from benchmarks.invariance import COMPOSITIONS, Text, decode, differences, make_prompts


def test_compositions_have_every_prompt_once_and_prompts_of_a_document_begin_with_it() -> None:
    assert all(sorted(sum(batches, [])) == list(range(8)) for batches in COMPOSITIONS.values())  # noqa: RUF017
    prompts = make_prompts(64, invariance.DOCUMENTS, invariance.QUESTIONS)
    for group, size in ((prompts[:4], 3300), (prompts[4:], 3500)):
        assert len({tuple(prompt[:size]) for prompt in group}) == 1
        assert len({tuple(prompt) for prompt in group}) == 4


class Batch:
    """A sampler whose state is the batch, and whose texts tell the prompts apart."""

    def start(self, prompts: list[list[int]]) -> "Batch":
        self.prompts, self.logits = prompts, np.asarray(prompts)
        return self

    def decode(self, state: "Batch", tokens: int, temperature: float) -> tuple["Batch", "Batch"]:
        assert temperature == 0.0
        self.tokens = [[10 * prompt[0]] * tokens for prompt in self.prompts]
        self.logprobs = [[-float(prompt[0])] * tokens for prompt in self.prompts]
        return self, self


def test_texts_are_those_of_the_prompts_whatever_the_batches() -> None:
    for batches in ([[0], [1], [2]], [[2, 0], [1]]):
        texts = decode(Batch(), [[5], [6], [7]], batches, tokens=2)
        assert [text.tokens for text in texts] == [[50, 50], [60, 60], [70, 70]]
        assert [text.logprobs for text in texts] == [[-5.0] * 2, [-6.0] * 2, [-7.0] * 2]
        assert [text.first_logits.tolist() for text in texts] == [[5], [6], [7]]


def test_differences_are_counted_up_to_the_first_token_that_differs() -> None:
    reference = [Text(np.asarray([3.0, 4.0]), [1, 2, 3], [-1.0, -2.0, -3.0])] * 3
    texts = [
        Text(np.asarray([3.0, 4.0]), [1, 2, 3], [-1.0, -2.0, -3.25]),
        Text(np.asarray([3.0, 4.5]), [1, 5, 3], [-1.5, -9.0, -9.0]),
        Text(np.asarray([3.0, 4.0]), [4, 2, 3], [-9.0, -9.0, -9.0]),
    ]
    row = differences(reference, texts)
    assert row["tokens_before_the_first_difference"] == [3, 1, 0]
    assert row["logprob_difference"] == 0.5
    assert row["logits_difference"] == pytest.approx(0.1)
    assert row["same_bits"] == [False, False, False]
    apart = np.nextafter(np.float32(4.0), np.float32(5.0))
    texts = [Text(np.asarray([3.0, last], np.float32), [1, 2], [-1.0, -2.0]) for last in (4.0, 4.0, apart)]
    assert differences(texts[:1] * 2, texts[1:])["same_bits"] == [True, False]
