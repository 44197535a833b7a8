"""Page tables for FlashInfer, blocks of tokens for FlexAttention, and peers that cannot run."""

import os

import jax.numpy as jnp
import numpy as np
import pytest
from forests import Tree, contexts, num_pages, trees
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import flex, peers
from benchmarks.inputs import Layout, Variant, make_inputs
from benchmarks.peers import PEERS, PageTable, Peers, level_tables, request_table
from benchmarks.workloads import flat
from codec_jax import Forest

SMALL = Layout(num_q_heads=8, num_kv_heads=2, head_dim=16, page_size=8)


def entry_slots(table: PageTable, entry: int) -> list[int]:
    """The token slots that a paged kernel reads for an entry."""
    pages = table.pages[table.page_ptr[entry] : table.page_ptr[entry + 1]]
    slots = [int(page) * table.page_size + i for page in pages for i in range(table.page_size)]
    return slots[: max(len(pages) - 1, 0) * table.page_size + int(table.last_page_tokens[entry])]


@settings(max_examples=80)
@given(tree=trees(max_nodes=12, max_length=40, max_requests=10), page_size=st.sampled_from([8, 16]))
def test_a_request_table_lists_every_context_in_order(tree: Tree, page_size: int) -> None:
    forest = Forest.from_nodes(*tree, page_size=page_size)
    table = request_table(forest)
    np.testing.assert_array_equal(table.row_ptr, np.arange(len(tree.leaf) + 1))
    expected = contexts(tree, page_size)
    for row, request in enumerate(forest.request_of_row):
        assert entry_slots(table, row) == expected[request]
        assert table.tokens[row] == len(expected[request])
        pages = expected[request][:: table.page_size]
        assert table.listed[row].tolist() == [
            *(slot // table.page_size for slot in pages),
            *[0] * (table.listed.shape[1] - len(pages)),
        ]


@pytest.mark.parametrize(("root", "page_size"), [(64, 32), (48, 16), (50, 2), (51, 1)])
def test_a_request_table_has_the_largest_pages_that_shared_nodes_fill(root, page_size):
    forest = Forest.from_nodes([-1, 0, 0], [root, 3, 70], [1, 2], page_size=32)
    assert request_table(forest).page_size == page_size


@settings(max_examples=80)
@given(tree=trees(max_nodes=12, max_length=40, max_requests=10))
def test_level_tables_together_list_every_context_once(tree: Tree) -> None:
    forest = Forest.from_nodes(*tree, page_size=8)
    got: list[list[int]] = [[] for _ in tree.leaf]
    for table in level_tables(forest):
        assert table.page_size == 8
        assert (np.diff(table.row_ptr) > 0).all()
        assert (table.row_ptr[0], table.row_ptr[-1]) == (0, len(tree.leaf))
        for entry in range(len(table.row_ptr) - 1):
            for row in range(table.row_ptr[entry], table.row_ptr[entry + 1]):
                got[row] += entry_slots(table, entry)
    expected = contexts(tree, 8)
    assert got == [expected[request] for request in forest.request_of_row]


def end_the_process(status: int, names: tuple[str, ...], variant: Variant) -> None:
    os._exit(status)


def test_a_peer_that_cannot_run_or_ends_its_process_is_reported_with_the_reason(monkeypatch):
    arguments = (flat(1, 20), SMALL, np.ones((1, 8, 16), np.float32), 1)
    running = Peers(PEERS)
    with monkeypatch.context() as patched:
        patched.setattr(peers, "measure", end_the_process)
        crashed = running.measure(1)
    without_gpu = running.measure(*arguments)
    running.close()
    for peer in PEERS:
        assert crashed[f"{peer}_us"] is without_gpu[f"{peer}_us"] is None
        assert crashed[f"{peer}_error"].startswith("BrokenProcessPool")
        assert "BrokenProcessPool" not in without_gpu[f"{peer}_error"]
        assert "Error: " in without_gpu[f"{peer}_error"]


@pytest.mark.parametrize(
    ("variant", "missing"),
    [
        (Variant(), None),
        (Variant(softcap=50.0, kv_dtype=jnp.float8_e4m3fn), None),
        (Variant(window=9, softcap=1.0), "window"),
        (Variant(sinks=True, window=9), "sinks, window"),
    ],
)
def test_a_kernel_is_not_measured_with_what_it_does_not_have(variant: Variant, missing: str | None) -> None:
    tensors = peers.Tensors(None, None, None, None, variant)
    if missing is None:
        tensors.has_only("cascade", "softcap", "kv_dtype")
    else:
        with pytest.raises(ValueError, match=rf"^cascade: expected no {missing}$"):
            tensors.has_only("cascade", "softcap", "kv_dtype")


def test_a_window_of_tokens_has_one_less_before_the_query() -> None:
    assert [peers._window_left(Variant(window=window)) for window in (None, 1, 1024)] == [-1, 0, 1023]


def test_pages_of_one_byte_are_lent_bit_by_bit() -> None:
    pages = make_inputs(flat(2, 20), SMALL).key_pages
    stored = Variant(kv_dtype=jnp.float8_e4m3fn).stored(pages)
    bits = np.asarray(peers._bits(stored))
    assert bits.dtype == np.uint8
    np.testing.assert_array_equal(bits.view(jnp.float8_e4m3fn), np.asarray(pages).astype(jnp.float8_e4m3fn))
    assert peers._bits(Variant().stored(pages)) is pages


# ---------------------------------------------------------------------- FlexAttention


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
