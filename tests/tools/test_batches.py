"""Batches of prompts: every request once, by what they share, and no more than the pool holds."""

from itertools import chain

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_jax import Forest, PagePool, generate


@settings(max_examples=60)
@given(st.data())
def test_batches_hold_every_request_once_and_fit_the_pool(data: st.DataObject) -> None:
    prompts = [
        np.asarray(prompt)
        for prompt in data.draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=70), min_size=1, max_size=9))
    ]
    samples, new = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 40))
    most, pages = data.draw(st.integers(1, 12)), data.draw(st.integers(8, 40))
    batches = generate.make_batches(prompts, samples=samples, max_new_tokens=new, max_requests=most, num_pages=pages)
    assert sorted(chain(*batches.requests)) == list(range(len(prompts) * samples))
    assert max(map(len, batches.requests)) == batches.max_requests <= most
    assert batches.num_pages <= pages
    for batch in batches.requests:
        texts = [prompts[request // samples] for request in batch]
        forest = Forest.from_sequences(texts, page_size=generate.PAGE_SIZE)
        assert generate.prefill_tokens(texts) == forest.length.sum()
        pool = PagePool.create(batches.num_pages, forest.used_pages)
        forest.reserve(pool, new)  # raises if the pool is too small


def test_prompts_that_share_a_prefix_meet_in_a_batch_wherever_they_stand() -> None:
    left, right = [1] * 40, [2] * 40
    prompts = [np.asarray([*(right if i % 2 else left), i]) for i in range(8)]
    batches = generate.make_batches(prompts, samples=2, max_new_tokens=4, max_requests=8, num_pages=1000)
    assert [{request // 2 % 2 for request in batch} for batch in batches.requests] == [{0}, {1}]
