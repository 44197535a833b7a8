"""What forests refuse, and the words that they have for it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from codec_jax import DraftTrees, Forest, KVPages, PagePool, Window
from codec_jax.forest import Tree

ONE = {"parent": [-1], "length": [5], "leaf": [0]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parent": [0]}, r"parent: .*before its child.*parent\[0\] = 0$"),
        ({"parent": [1, -1], "length": [1, 1]}, r"parent: .*before its child.*parent\[0\] = 1$"),
        ({"parent": [-1, 2, 1], "length": [1, 1, 1]}, r"parent: .*parent\[1\] = 2$"),
        ({"parent": [-2]}, r"parent: expected -1 for a root.*= -2$"),
        ({"length": [5, 6]}, r"length: expected one number for each of the 1 nodes.*got 2"),
        ({"length": [-3]}, r"length: expected no negative lengths, got length\[0\] = -3"),
        ({"length": [5.0]}, r"length: expected a list of integers, got float64"),
        ({"parent": ["x"]}, r"parent: expected a list of integers, got <U1"),
        ({"leaf": [True]}, r"leaf: expected a list of integers, got bool"),
        ({"leaf": [[0]]}, r"leaf: expected a list of integers, got int64 of shape \(1, 1\)"),
        ({"leaf": 0}, r"leaf: expected a list of integers, got int64 of shape \(\)"),
        ({"length": [2**31]}, r"length: expected integers below 2\*\*31, got 2147483648"),
        ({"leaf": [0, 1]}, r"leaf: expected nodes in \[0, 1\), got leaf\[1\] = 1$"),
        ({"leaf": [-1]}, r"leaf: expected nodes in \[0, 1\), got leaf\[0\] = -1"),
        ({"leaf": []}, r"leaf: expected at least one request, got none"),
        ({"parent": [], "length": []}, r"leaf: expected nodes in \[0, 0\), got leaf\[0\] = 0"),
        ({"page_size": 0}, r"page_size: expected a positive multiple of 8, got 0"),
        ({"page_size": -8}, r"page_size: expected a positive multiple of 8, got -8"),
        ({"page_size": 12}, r"page_size: expected a positive multiple of 8, got 12"),
        ({"request_capacity": 0}, r"request_capacity: expected at least the 1 in use, got 0"),
        ({"leaf": [0] * 5, "request_capacity": 4}, r"request_capacity: expected at least the 5 in use, got 4"),
        ({"node_capacity": 0}, r"node_capacity: expected at least the 1 in use, got 0"),
    ],
)
def test_from_nodes_names_the_bad_argument(change, message):
    with pytest.raises(ValueError, match=message):
        Forest.from_nodes(**{**ONE, **change})


@pytest.mark.parametrize("count", [1.5, -1, "x"])
def test_counts_of_tokens_that_cannot_be_are_named(count):
    forest = Forest.from_nodes(**ONE)
    for positions in (forest.positions, forest.slots):
        with pytest.raises(ValueError, match=r"^count: expected an integer of at least 0, got "):
            positions(count)


def test_what_a_window_hides_is_asked_with_a_window():
    forest = Forest.from_nodes(**ONE)
    with pytest.raises(TypeError, match=r"^window: expected a Window, got int"):
        forest.hidden_by(5)
    with pytest.raises(ValueError, match=r"^query_tokens: expected an integer of at least 1, got 0"):
        forest.hidden_by(Window(5), 0)
    with pytest.raises(ValueError, match=r"^chunked: expected True or False, got 'no'"):
        Window(5, "no")


def test_a_text_does_not_shrink():
    with pytest.raises(ValueError, match=r"^count: expected at least 0 tokens for request 0, got -3"):
        Forest.from_nodes(**ONE).extend(-3)


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ((-1, 16, 2, 64), ValueError, r"num_pages: expected an integer of at least 0, got -1"),
        ((4, 0, 2, 64), ValueError, r"page_size: expected an integer of at least 1, got 0"),
        ((4, 16, 2.5, 64), ValueError, r"num_kv_heads: expected an integer of at least 1, got 2.5"),
        ((4, 16, 2, 0), ValueError, r"head_dim: expected an integer of at least 1, got 0"),
        ((4, 16, 2, 64, jnp.float8_e4m3fn, 3), TypeError, r"quantisation: expected a Quantisation, got int"),
    ],
)
def test_pages_that_cannot_be_are_refused_by_name(sizes, error, message):
    with pytest.raises(error, match=f"^{message}"):
        KVPages.zeros(*sizes[:5], **({"quantisation": sizes[5]} if len(sizes) > 5 else {}))


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_parents_of_drafts_that_come_after_them_are_refused_wherever_they_are(array):
    with pytest.raises(ValueError, match=r"^parent: expected -1 for a root .*, got parent\[0, 1\] = 5"):
        DraftTrees.from_parents(array([[-1, 5]]))
    with pytest.raises(ValueError, match=r"^parent: expected rows of one length, got rows of several"):
        DraftTrees.from_parents([[-1], [-1, 0]])


@pytest.mark.parametrize(
    ("lists", "options", "message"),
    [
        ([], {}, r"token_lists: expected at least one list of tokens, got none"),
        ([[1], []], {}, r"token_lists\[1\]: expected at least one token, none negative, got an empty list"),
        ([[1, -2]], {}, r"token_lists\[0\]: expected at least one token, none negative, got token -2"),
        ([[1], [1.5]], {}, r"token_lists\[1\]: expected a list of integers, got float64"),
        ([[2**31]], {}, r"token_lists\[0\]: expected integers below 2\*\*31, got 2147483648"),
        ([[1]], {"page_size": 9}, r"page_size: expected a positive multiple of 8, got 9"),
        ([[1], [2]], {"request_capacity": 1}, r"request_capacity: expected at least the 2 in use, got 1"),
        (
            [[i] for i in range(129)],
            {"node_capacity": 128},
            r"node_capacity: expected at least the 129 in use, got 128",
        ),
    ],
)
def test_from_sequences_names_the_bad_argument(lists, options, message):
    with pytest.raises(ValueError, match=message):
        Forest.from_sequences(lists, **options)


@pytest.mark.parametrize(
    ("table", "lens", "page_size", "message"),
    [
        ([[0, 1]], [33], 16, r"context_lens: expected lengths in \[0, 32\].*got context_lens\[0\] = 33"),
        ([[0], [1]], [3, -1], 16, r"context_lens: .*got context_lens\[1\] = -1"),
        ([[0], [1]], [0, 0], 16, r"context_lens: expected at least one row with a context"),
        ([[0], [1]], [3.0, 3.0], 16, r"context_lens: expected a list of integers, got float64"),
        ([[0], [1]], [3], 16, r"block_table: expected integers of shape \[1, max_pages\].*\(2, 1\)"),
        ([0, 1], [3, 3], 16, r"block_table: expected integers of shape \[2, max_pages\].*\(2,\)"),
        ([[0.0]], [3], 16, r"block_table: expected integers .*got float64"),
        ([[0, 1], [0, -1]], [17, 17], 16, r"block_table: expected page ids in .*, got block_table\[1, 1\] = -1"),
        ([[2**32]], [3], 16, r"block_table: expected page ids.*block_table\[0, 0\] = 4294967296"),
        ([[0]], [3], 10, r"page_size: expected a positive multiple of 8, got 10"),
    ],
)
def test_from_block_table_names_the_bad_argument(table, lens, page_size, message):
    with pytest.raises(ValueError, match=message):
        Forest.from_block_table(np.asarray(table), np.asarray(lens), page_size)


def test_rows_of_a_block_table_that_have_several_lengths_are_refused_by_name():
    with pytest.raises(ValueError, match=r"^block_table: expected rows of one length, got rows of several"):
        Forest.from_block_table([[0, 1], [2]], np.asarray([20, 3]), 16)


def test_a_cycle_in_a_built_tree_raises():
    with pytest.raises(ValueError, match="parent: expected a forest, got a cycle"):
        Forest.build(
            Tree(
                parent=np.asarray([1, 0]),
                length=np.asarray([1, 1]),
                page_count=np.asarray([1, 1]),
                page_ids=np.arange(2),
                leaf=np.asarray([0]),
                page_size=8,
            )
        )


@pytest.mark.parametrize(
    "edit",
    [
        lambda forest, pool: forest.fork([0]),
        lambda forest, pool: forest.reserve(pool, 1),
        lambda forest, pool: forest.reserve(pool, 100, [0]),
        lambda forest, pool: forest.retire(pool, [0]),
        lambda forest, pool: forest.chunks(16),
        lambda forest, pool: forest.only([0]),
    ],
    ids=["fork", "reserve", "reserve one", "retire", "chunks", "only"],
)
def test_editing_a_forest_of_device_arrays_raises(edit):
    forest = Forest.from_nodes([-1, 0], [16, 3], [1, 1], request_capacity=4)
    pool = PagePool.create(16, taken=forest.used_pages)
    with pytest.raises(TypeError, match=r"forest: expected NumPy arrays, got arrays on a device"):
        edit(jax.tree.map(jnp.asarray, forest), pool)


def test_more_token_slots_than_int32_numbers_are_refused():
    for length, page_size in (([2**31 - 8] * 2, 2**20), ([1, 1, 1], 2**31 - 8)):
        with pytest.raises(ValueError, match=r"^pages: expected less than 2\*\*31 token slots"):
            Forest.from_nodes([-1] * len(length), length, [0], page_size=page_size)


@pytest.mark.parametrize("count", [1.9, [1, 1], True])
def test_an_extend_by_something_else_than_integers_for_each_request_raises(count):
    forest = Forest.from_nodes([-1], [3], [0], page_size=16)
    with pytest.raises(ValueError, match="count: expected an integer"):
        forest.extend(count)


@pytest.mark.parametrize("request_slot", [-1, 2])
def test_the_path_of_a_request_slot_that_does_not_exist_raises(request_slot):
    forest = Forest.from_nodes([-1, 0], [3, 4], [0, 1], page_size=16)
    with pytest.raises(ValueError, match=rf"request: expected a slot in \[0, 2\), got {request_slot}"):
        forest.context_slots(request_slot)


@pytest.mark.parametrize("page_size", [16.0, "16"])
def test_page_sizes_are_integers(page_size):
    with pytest.raises(ValueError, match="page_size: expected a positive multiple of 8"):
        Forest.from_nodes([-1], [3], [0], page_size=page_size)
