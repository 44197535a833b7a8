"""What FlexAttention and FlashAttention-3 get to see of a forest: readers and blocks of tokens, and whole contexts."""

import shutil

import numpy as np
import pytest
from forests import SECTIONS, Tree, contexts, num_pages, trees
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import flash_attention, flex, inputs
from codec_jax import Forest


def reads(tree: Tree, page_size: int, num_slots: int) -> np.ndarray:
    """Say of each row, depth first, and each slot whether the row reads it."""
    forest = Forest.from_nodes(*tree, page_size=page_size)
    expected = np.zeros((len(tree.leaf), num_slots), bool)
    for row, request in enumerate(forest.request_of_row):
        expected[row, contexts(tree, page_size)[request]] = True
    return expected


@settings(max_examples=60)
@given(tree=trees(max_length=300), page_size=st.sampled_from([8, 16]), rows_per_block=st.sampled_from([1, 3, 128]))
def test_lists_hold_the_blocks_that_rows_read_and_whole_ones_need_no_mask(
    tree: Tree, page_size: int, rows_per_block: int
) -> None:
    num_slots = (num_pages(tree, page_size) + 3) * page_size
    expected = reads(tree, page_size, num_slots)
    lo, hi = flex.readers(Forest.from_nodes(*tree, page_size=page_size), num_slots)
    rows = np.arange(len(expected))[:, None]
    np.testing.assert_array_equal((lo <= rows) & (rows < hi), expected)
    lists = flex.block_lists(lo, hi, len(expected), rows_per_block)
    width = flex.BLOCK_TOKENS
    padded = np.pad(expected, ((0, 0), (0, -num_slots % width))).reshape(len(expected), -1, width)
    for i, start in enumerate(range(0, len(expected), rows_per_block)):
        of_rows = padded[start : start + rows_per_block]
        whole = lists.whole[i, : lists.whole_count[i]].tolist()
        assert whole == np.flatnonzero(of_rows.all((0, 2))).tolist()
        some = np.flatnonzero(of_rows.any((0, 2))).tolist()
        assert sorted(whole + lists.masked[i, : lists.masked_count[i]].tolist()) == some


@pytest.mark.skipif(shutil.which("c++") is None, reason="torch compiles the call with a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@pytest.mark.parametrize("by_request", [False, True])
def test_the_call_attends_to_every_context(by_request: bool) -> None:
    torch = pytest.importorskip("torch")
    forest, page_size, heads_per_kv_head = Forest.from_nodes(*SECTIONS, page_size=16), 16, 4
    random = np.random.default_rng(0)
    query = random.normal(size=(4, 8, 32)).astype(np.float32)
    key, value = random.normal(size=(2, num_pages(SECTIONS, page_size) + 2, page_size, 2, 32)).astype(np.float32)
    with torch.no_grad():
        call = flex.attend(
            forest, torch.from_numpy(query), (torch.from_numpy(key), torch.from_numpy(value)), by_request
        )
        out = call().numpy()
    for row, request in enumerate(forest.request_of_row):
        slots = contexts(SECTIONS, page_size)[request]
        own_key, own_value = (np.asarray(x, np.float64).reshape(-1, 2, 32)[slots] for x in (key, value))
        for head in range(8):
            kv_head = head // heads_per_kv_head
            weights = np.exp(own_key[:, kv_head] @ query[row, head] / np.sqrt(32))
            expected = weights @ own_value[:, kv_head] / weights.sum()
            np.testing.assert_allclose(out[row, head], expected, rtol=1e-4, atol=1e-5)


def test_every_request_has_a_copy_of_its_context(monkeypatch):
    torch = pytest.importorskip("torch")
    forest = Forest.from_nodes(*SECTIONS, page_size=16)
    pages = np.random.default_rng(0).normal(size=(2, num_pages(SECTIONS, 16), 16, 2, 4))
    key, value, lengths = flash_attention.copies(forest, tuple(map(torch.from_numpy, pages)))
    for row, request in enumerate(forest.request_of_row):
        slots = contexts(SECTIONS, 16)[request]
        assert int(lengths[row]) == len(slots)
        for copied, of in zip((key, value), pages, strict=True):
            np.testing.assert_array_equal(copied[row, : len(slots)].numpy(), of.reshape(-1, 2, 4)[slots])
    monkeypatch.setattr(inputs, "MOST_DENSE_BYTES", key.nbytes + value.nbytes)
    flash_attention.copies(forest, tuple(map(torch.from_numpy, pages)))
    monkeypatch.setattr(inputs, "MOST_DENSE_BYTES", key.nbytes + value.nbytes - 1)
    with pytest.raises(ValueError, match="expected at most 0 GB of unshared KV, got 0 GB"):
        flash_attention.copies(forest, tuple(map(torch.from_numpy, pages)))
