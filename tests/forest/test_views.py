"""Other forests over the same pages: chunks of nodes for prefill, and requests that share nothing."""

import pytest
from forests import active_requests, ancestry, contexts, node_slots, num_pages, page_sizes, readers, trees
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from codec_jax import Forest, PagePool, make_plan
from codec_jax.forest import NO_SLOT


@settings(deadline=None, max_examples=80)
@given(trees(), page_sizes, st.integers(1, 4))
def test_chunks_cover_the_tokens_of_every_read_node_once_ancestors_first(tree, page_size, chunk_pages):
    assume(any(contexts(tree, page_size)))
    chunk = chunk_pages * page_size
    forest = Forest.from_nodes(*tree, page_size=page_size)
    view, source = forest.chunks(chunk)
    slots, covered = node_slots(tree, page_size), {}
    assert view.page_size == page_size
    requests = active_requests(view)
    assert requests == list(range(len(source)))
    context_of_reader = {node: contexts(tree, page_size)[below[0]] for node, below in enumerate(readers(tree)) if below}
    for request, node in zip(requests, source.tolist(), strict=True):
        context = view.context_slots(request).tolist()
        own = context[len(context) - view.length[view.leaf[request]] :]
        assert 0 < len(own) <= chunk
        assert context == context_of_reader[node][: len(context)]
        for above in ancestry(tree.parent, node)[:-1]:
            assert covered.get(above, []) == slots[above]
        covered.setdefault(node, []).extend(own)
        assert view.slots(chunk)[request].tolist() == [NO_SLOT] * (chunk - len(own)) + own
    assert covered == {node: slots[node] for node in context_of_reader if slots[node]}
    assert len(source) == sum(-(-tree.length[node] // chunk) for node in context_of_reader)


def test_a_forest_of_empty_contexts_has_no_chunks():
    view, source = Forest.from_nodes([-1, -1], [0, 9], [0]).chunks(16)
    assert len(source) == 0
    assert active_requests(view) == []
    make_plan(view, num_q_heads=4, num_kv_heads=2, head_dim=64).check(view)


def test_chunks_see_neither_reserved_pages_nor_retired_nodes():
    forest = Forest.from_nodes([-1, 0, 0], [20, 9, 9], [1, 2], page_size=8)
    pool = PagePool.create(64, taken=forest.used_pages)
    forest, pool = forest.reserve(pool, 40)
    forest, pool = forest.retire(pool, [1])
    view, source = forest.chunks(16)
    assert source.tolist() == [0, 0, 1]
    assert [len(view.context_slots(r)) for r in range(3)] == [16, 20, 29]
    assert view.context_slots(2).tolist() == forest.context_slots(0).tolist()


@pytest.mark.parametrize("chunk", [0, -16, 8, 24])
def test_a_chunk_that_is_not_a_multiple_of_the_page_size_raises(chunk):
    forest = Forest.from_nodes([-1], [40], [0], page_size=16)
    with pytest.raises(ValueError, match=rf"chunk: expected .*, got {chunk}$"):
        forest.chunks(chunk)


@settings(deadline=None, max_examples=80)
@given(trees(), page_sizes, st.data())
def test_without_sharing_every_node_has_one_reader_and_contexts_are_the_same(tree, page_size, data):
    forest = Forest.from_nodes(*tree, page_size=page_size)
    left = data.draw(st.sets(st.integers(0, len(tree.leaf) - 1)))
    forest, _ = forest.retire(PagePool.create(max(1, num_pages(tree, page_size)), forest.used_pages), sorted(left))
    apart = forest.unshared()
    assert apart.request_capacity == forest.request_capacity
    assert active_requests(apart) == active_requests(forest)
    paths = [apart.path(request) for request in active_requests(forest)]
    nodes = [node for path in paths for node in path]
    assert len(set(nodes)) == len(nodes)
    assert (apart.row_hi - apart.row_lo)[nodes].tolist() == [1] * len(nodes)
    for request, slots in enumerate(contexts(tree, page_size)):
        assert apart.context_slots(request).tolist() == ([] if request in left else slots)
