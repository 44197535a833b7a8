"""FlashInfer's page tables on any machine, and peers that cannot run."""

import os

import numpy as np
import pytest
from forests import Tree, contexts, trees
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import peers
from benchmarks.inputs import Layout
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


def test_a_level_table_holds_what_is_shared_once():
    first, second = level_tables(Forest.from_nodes([-1, 0, 0, 0], [40, 8, 8, 8], [1, 2, 3], page_size=8))
    assert (first.row_ptr.tolist(), len(first.pages)) == ([0, 3], 5)
    assert (second.row_ptr.tolist(), len(second.pages)) == ([0, 1, 2, 3], 3)


def end_the_process(status: int, names: tuple[str, ...]) -> None:
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
