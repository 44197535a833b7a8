import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_jax import Forest, KVPages, OutOfPagesError, PagePool
from codec_jax.forest import NO_SLOT, Quantisation


def test_a_new_pool_is_free_but_for_the_pages_that_are_taken():
    assert PagePool.create(5).num_free == PagePool.create(5).num_pages == 5
    pool = PagePool.create(5, taken=np.asarray([3, 0, 3]))
    assert pool.owners.tolist() == [1, 0, 0, 2, 0]
    assert pool.num_free == 3
    assert PagePool.create(1, taken=np.zeros(0, np.int32)).num_free == 1


def test_allocate_takes_the_free_pages_with_the_lowest_ids_and_leaves_its_input_alone():
    pool = PagePool.create(6, taken=np.asarray([1, 3]))
    after, pages = pool.allocate(3)
    assert pages.tolist() == [0, 2, 4]
    assert after.num_free == 1
    assert pool.num_free == 4
    assert pool.allocate(3)[1].tolist() == [0, 2, 4]
    assert after.allocate(1)[1].tolist() == [5]


def test_allocating_nothing_changes_nothing_even_when_the_pool_is_full():
    full, _ = PagePool.create(2).allocate(2)
    after, pages = full.allocate(0)
    assert pages.tolist() == []
    assert after.owners.tolist() == [1, 1]


def test_an_exhausted_pool_raises_and_serves_again_after_a_release():
    pool, pages = PagePool.create(4).allocate(3)
    with pytest.raises(OutOfPagesError, match=r"the pool has 1 free pages of 4, 2 are needed"):
        pool.allocate(2)
    assert pool.num_free == 1
    pool = pool.release(pages[1:])
    assert pool.allocate(3)[1].tolist() == [1, 2, 3]


def test_a_page_with_two_owners_is_free_after_the_second_release():
    pool = PagePool.create(3, taken=np.asarray([1, 1]))
    once = pool.release(np.asarray([1]))
    assert once.num_free == 2
    assert once.release(np.asarray([1])).num_free == 3
    assert pool.release(np.asarray([1, 1])).num_free == 3
    assert pool.owners.tolist() == [0, 2, 0]
    assert pool.release(np.zeros(0, np.int32)).owners.tolist() == [0, 2, 0]


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([1], r"pages: expected pages that are taken, got page 1 more often than it has owners"),
        ([0, 2, 2], r"pages: expected pages that are taken, got page 2 more often than it has owners"),
        ([0, 4], r"pages: expected page ids in \[0, 4\), got 0 to 4"),
        ([-1], r"pages: expected page ids in \[0, 4\), got -1 to -1"),
    ],
    ids=["free", "twice", "past the end", "negative"],
)
def test_releasing_pages_that_are_not_taken_raises(pages, message):
    pool = PagePool.create(4, taken=np.asarray([0, 2]))
    with pytest.raises(ValueError, match=message):
        pool.release(np.asarray(pages))
    assert pool.owners.tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("num_pages", "taken", "message"),
    [
        (0, None, r"num_pages: expected an integer of at least 1.*got 0"),
        (-3, None, r"num_pages: expected an integer of at least 1.*got -3"),
        (4, [1, 4], r"taken: expected page ids in \[0, 4\), got 1 to 4; make the pool large enough"),
        (4, [-1], r"taken: expected page ids in \[0, 4\), got -1 to -1"),
    ],
)
def test_create_names_the_bad_argument(num_pages, taken, message):
    with pytest.raises(ValueError, match=message):
        PagePool.create(num_pages, taken=None if taken is None else np.asarray(taken))


def test_allocating_a_negative_number_of_pages_raises():
    with pytest.raises(ValueError, match=r"count: .*-1"):
        PagePool.create(4).allocate(-1)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 12), st.data())
def test_a_pool_agrees_with_a_set_of_free_pages(num_pages, data):
    pool, free, taken = PagePool.create(num_pages), set(range(num_pages)), set()
    for _ in range(8):
        if data.draw(st.booleans()):
            count = data.draw(st.integers(0, num_pages))
            if count > len(free):
                with pytest.raises(OutOfPagesError, match=f"{len(free)} free pages of {num_pages}, {count} are needed"):
                    pool.allocate(count)
                continue
            pool, pages = pool.allocate(count)
            assert pages.tolist() == sorted(free)[:count]
            free -= set(pages.tolist())
            taken |= set(pages.tolist())
        elif taken:
            back = data.draw(st.lists(st.sampled_from(sorted(taken)), unique=True))
            pool = pool.release(np.asarray(back, int))
            free |= set(back)
            taken -= set(back)
        assert pool.num_free == len(free)
        assert np.flatnonzero(pool.owners).tolist() == sorted(taken)


NUM_PAGES, PAGE_SIZE, HEADS, DIM = 5, 8, 2, 3


def rows(shape, first):
    """Different numbers that bfloat16 holds exactly."""
    count = int(np.prod(shape)) * HEADS * DIM
    return jnp.asarray(first + np.arange(count) % 128, jnp.float32).reshape(*shape, HEADS, DIM)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_empty_pages_are_zero_and_have_the_paged_layout(dtype):
    pages = KVPages.zeros(NUM_PAGES, PAGE_SIZE, HEADS, DIM, dtype)
    for array in (pages.key, pages.value):
        assert array.shape == (NUM_PAGES, PAGE_SIZE, HEADS, DIM)
        assert array.dtype == dtype
        assert not array.any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_write_stores_every_row_at_its_slot_and_drops_no_slot(dtype, jitted):
    pages = KVPages(*(jnp.full((NUM_PAGES, PAGE_SIZE, HEADS, DIM), fill, dtype) for fill in (-7, -9)))
    slots = np.asarray([[3 * PAGE_SIZE + 5, NO_SLOT, 0], [NO_SLOT, NUM_PAGES * PAGE_SIZE - 1, PAGE_SIZE]], np.int32)
    key, value = rows((2, 3), 0), rows((2, 3), 64)
    write = jax.jit(KVPages.write) if jitted else KVPages.write
    after = write(pages, jnp.asarray(slots), key, value)
    for array, stored, fill in ((after.key, key, -7), (after.value, value, -9)):
        expected = np.full((NUM_PAGES, PAGE_SIZE, HEADS, DIM), fill, np.float32)
        for at, slot in np.ndenumerate(slots):
            if slot != NO_SLOT:
                expected[slot // PAGE_SIZE, slot % PAGE_SIZE] = stored[at]
        assert array.dtype == dtype
        np.testing.assert_array_equal(np.asarray(array, np.float32), expected)
    assert (np.asarray(pages.key, np.float32) == -7).all()


def test_writing_only_to_no_slot_changes_nothing():
    pages = KVPages.zeros(NUM_PAGES, PAGE_SIZE, HEADS, DIM)
    after = jax.jit(KVPages.write)(pages, jnp.full((2, 3), NO_SLOT, jnp.int32), rows((2, 3), 1), rows((2, 3), 1))
    assert not after.key.any()
    assert not after.value.any()


@pytest.mark.parametrize(("dtype", "large"), [(jnp.float16, 7e4), (jnp.bfloat16, 3.4e38), (jnp.float32, np.inf)])
def test_what_the_pages_cannot_hold_as_a_number_is_stored_as_0_in_v_and_as_it_is_in_k(dtype, large):
    row = jnp.asarray([[[[large, 1.0]]]], jnp.float32)
    pages = KVPages.zeros(1, 8, 1, 2, dtype).write(jnp.zeros((1, 1), jnp.int32), row, row)
    assert pages.value[0, 0, 0].tolist() == [0.0, 1.0]
    assert pages.key[0, 0, 0].tolist() == [np.inf, 1.0]


def test_pages_of_one_byte_hold_numbers_over_their_scale_and_count_what_is_too_large():
    """Rounded to 4 significant bits, as the format says; K keeps its NaN, V none."""
    rng, scale = np.random.default_rng(0), {"key": [0.5, 2.0], "value": 0.25}
    pages = KVPages.zeros(4, 8, 2, 64, jnp.float8_e4m3fn, quantisation=Quantisation.of(2, scale["key"], scale["value"]))
    key, value = (rng.normal(size=(1, 3, 2, 64)).astype(np.float32) * 3 for _ in "kv")
    key[0, 0, 0, 0], key[0, 1, 1, :2], value[0, 0, 1, :3] = np.nan, [-897.0, 2000.0], [np.inf, np.nan, -112.5]
    key[0, 2] = value[0, 2] = 1e9  # not stored
    after = jax.jit(KVPages.write)(pages, jnp.asarray([[9, 17, NO_SLOT]]), key, value)
    assert after.quantisation.saturated.tolist() == [4]
    assert np.isnan(after.key.astype(jnp.float32)).sum() == 1
    value[0, 0, 1, :3] = [112.0, 0.0, -112.0]
    key[0, 1, 1, :2] = [-896.0, 896.0]
    for stored, meant, factor in ((after.key, key, [[0.5], [2.0]]), (after.value, value, [[0.25]])):
        found = np.asarray(stored, np.float32).reshape(-1, 2, 64)[[9, 17]] * factor
        at = np.isfinite(meant[0, :2])
        # Half of a unit in the last of 3 bits after the leading one, or of the smallest number.
        bound = np.maximum(np.abs(meant[0, :2]) / 16, np.broadcast_to(factor, (2, 64)) * 2.0**-10)
        assert (np.abs(found - meant[0, :2]) <= bound)[at].all()
    assert np.count_nonzero(np.asarray(after.value, np.float32).reshape(-1, 128).any(axis=1)) == 2
    moved = after.move(jnp.asarray([[9]]), jnp.asarray([[3]]))
    assert moved.quantisation is not None
    np.testing.assert_array_equal(moved.value[0, 3], after.value[1, 1])


@pytest.mark.parametrize("before", [2**31 - 65, 2**31 - 64, 2**31 - 1])
def test_what_is_too_large_is_counted_up_to_the_greatest_count(before):
    quantisation = Quantisation.of(1)._replace(saturated=jnp.asarray([before], jnp.int32))
    pages = KVPages.zeros(1, 8, 1, 64, jnp.float8_e4m3fn, quantisation=quantisation)
    after = pages.write(np.asarray([[0]]), jnp.full((1, 1, 1, 64), 1e9), jnp.zeros((1, 1, 1, 64)))
    assert after.quantisation.saturated.tolist() == [2**31 - 1]


@pytest.mark.parametrize("page_size", [8, 24])
def test_pages_of_one_byte_with_scales_by_token_hold_rows_of_any_size(page_size):
    """Each number to 4 significant bits of its own, or to 2^-9 of the smallest that its row's scale leaves."""
    rng, quantisation = np.random.default_rng(0), Quantisation.by_token(4, page_size, 2)
    pages = KVPages.zeros(4, page_size, 2, 64, jnp.float8_e4m3fn, quantisation=quantisation)
    size = 10.0 ** rng.uniform(-30, 4, (1, 5, 2, 1))
    key, value = (np.clip(rng.normal(size=(1, 5, 2, 64)) * size, -1.4e4, 1.4e4).astype(np.float32) for _ in "kv")
    key[0, 0, 0], value[0, 1, 1] = 0.0, 1e-44
    key[0, 2, 0, :2], value[0, 3, 0, :2] = [np.nan, -np.inf], [np.inf, np.nan]
    key[0, 3, 1, 0] = 1e6
    slots = np.asarray([[page_size - 1, page_size, 3 * page_size - 1, 0, NO_SLOT]])
    after = jax.jit(KVPages.write)(pages, slots, key, value)
    assert after.quantisation.saturated.tolist() == [3]  # both infinities, and what is above 448 x 32
    for stored, scale, meant in zip((after.key, after.value), after.quantisation[:2], (key, value), strict=True):
        assert scale.dtype == jnp.float32
        factor = np.moveaxis(np.asarray(scale), 1, 2).reshape(-1, 2)[slots[0, :4], :, None]
        assert np.isfinite(factor).all()
        found = np.asarray(stored, np.float32).reshape(-1, 2, 64)[slots[0, :4]] * factor
        at = np.isfinite(meant[0, :4]) & (np.abs(meant[0, :4]) < 1e6)
        bound = np.maximum(np.abs(np.where(at, meant[0, :4], 0)) / 15.9, factor * 2.0**-10)
        assert (np.abs(found - meant[0, :4]) <= bound)[at].all()
    assert np.isnan(after.key.astype(jnp.float32)).sum() == 1
    assert np.isfinite(after.value.astype(jnp.float32)).all()
    moved = after.move(jnp.asarray([[0, 0, 4 * page_size]]), jnp.asarray([[2 * page_size + 1, NO_SLOT, 5]]))
    for before, now in zip(after.quantisation[:2], moved.quantisation[:2], strict=True):
        np.testing.assert_array_equal(now[2, :, 1], before[0, :, 0])
        assert np.count_nonzero(now != before) == 2


def test_what_is_no_quantisation_of_pages_is_refused():
    row = jnp.ones((1, 1, 2, 64))
    with pytest.raises(ValueError, match=r"dtype: expected float8_e4m3fn to write one byte a number, got float8_e5m2"):
        KVPages.zeros(4, 8, 2, 64, jnp.float8_e5m2)
    read_only = KVPages(*[jnp.zeros((4, 8, 2, 64), jnp.float8_e5m2)] * 2, Quantisation.of(2))
    with pytest.raises(ValueError, match="float8_e5m2, which is only read"):
        read_only.write(jnp.zeros((1, 1), jnp.int32), row, row)
    with pytest.raises(ValueError, match=r"quantisation: expected None for pages of bfloat16"):
        KVPages.zeros(4, 8, 2, 64, quantisation=Quantisation.of(2))
    with pytest.raises(ValueError, match=r"quantisation.key_scale: expected .*page_size = 8\]"):
        KVPages.zeros(4, 8, 2, 64, jnp.float8_e4m3fn, quantisation=Quantisation.by_token(4, 16, 2))
    mixed = Quantisation.of(2)._replace(value_scale=jnp.ones(3))
    with pytest.raises(ValueError, match=r"quantisation.value_scale: expected shape \[K = 2\], got \(3,\)"):
        KVPages.zeros(4, 8, 2, 64, jnp.float8_e4m3fn, quantisation=mixed)
    for dtype in ("fp8", "int8"):
        with pytest.raises(ValueError, match=rf"^dtype: expected float32, .* got {dtype}"):
            KVPages.zeros(4, 8, 2, 64, dtype)
    with pytest.raises(ValueError, match=r"^key_scale: expected numbers, got 'a'"):
        Quantisation.of(2, "a")
    for make in (lambda: Quantisation.of(0), lambda: Quantisation.by_token(4, 16, -1)):
        with pytest.raises(ValueError, match=r"^num_kv_heads: expected an integer of at least 1"):
            make()
    with pytest.raises(ValueError, match=r"key_scale: expected a number, or one for each of 2 kv heads, got"):
        Quantisation.of(2, np.ones(3))
    with pytest.raises(ValueError, match=r"value_scale: expected positive numbers .*, got \[1.0, 0.0\]"):
        Quantisation.of(2, 1.0, [1.0, 0.0])
    for scale in (1e-38, 3e38, 1e300, np.inf, np.nan, -1.0):
        with pytest.raises(ValueError, match="key_scale: expected positive numbers from"):
            Quantisation.of(2, scale)


@pytest.mark.parametrize("scale", [2.0**-100, 1e-20, 1e20, 2.0**100])
def test_whatever_the_scale_what_is_stored_is_finite(scale):
    pages = KVPages.zeros(1, 8, 1, 64, jnp.float8_e4m3fn, quantisation=Quantisation.of(1, scale, scale))
    numbers = np.asarray([0.0, scale, -3 * scale, 448 * scale, 1e6 * scale, -0.0, 1.0, -2.0], np.float32)
    row = jnp.asarray(np.resize(numbers, (1, 1, 1, 64)))
    pages = pages.write(jnp.zeros((1, 1), jnp.int32), row, row)
    for stored in (pages.key, pages.value):
        kept = np.asarray(stored[0, 0, 0, :8], np.float64)
        expected = np.clip(numbers.astype(np.float64) / scale, -448, 448)
        np.testing.assert_allclose(kept, expected, rtol=2**-4, atol=2**-9)


def test_negative_slots_are_out_of_bounds_as_large_ones_are():
    slots, row = jnp.asarray([[-1, 2, -33, NO_SLOT]]), jnp.arange(1.0, 5.0).reshape(1, 4, 1, 1)
    pages = KVPages.zeros(4, 8, 1, 1, jnp.float32).write(slots, row, row)
    assert np.flatnonzero(pages.value).tolist() == np.flatnonzero(pages.key).tolist() == [2]
    there = pages.move(jnp.asarray([[2, 2, -30, 2]]), jnp.asarray([[-1, 5, 6, NO_SLOT]]))
    assert np.flatnonzero(there.value).tolist() == [2, 5]


def test_pages_of_one_byte_are_written_with_scales_and_others_without():
    row = jnp.full((1, 1, 2, 64), 1000.0)
    pages = KVPages(*[jnp.zeros((4, 8, 2, 64), jnp.float8_e4m3fn)] * 2)
    with pytest.raises(ValueError, match=r"^quantisation: expected the scales of pages of one byte .*, got None"):
        pages.write(jnp.zeros((1, 1), jnp.int32), row, row)
    pages = KVPages(*[jnp.zeros((4, 8, 2, 64), jnp.float8_e5m2)] * 2)
    with pytest.raises(ValueError, match="float8_e5m2, which is only read"):
        pages.write(jnp.zeros((1, 1), jnp.int32), row, row)
    pages = KVPages(*[jnp.zeros((4, 8, 2, 64), jnp.bfloat16)] * 2, Quantisation.of(2))
    with pytest.raises(ValueError, match="bfloat16, which is only read"):
        pages.write(jnp.zeros((1, 1), jnp.int32), row, row)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(1, 2, 4), (3, 1, 1, 4), (3, 1, 2, 4), (3, 2, 2, 3), (3, 2, 1, 4)])
@pytest.mark.parametrize("name", ["key", "value"])
def test_rows_that_are_not_one_for_each_slot_are_refused(name, shape, dtype):
    pages, rows = KVPages.zeros(4, 8, 2, 4, dtype), dict.fromkeys(("key", "value"), jnp.ones((3, 2, 2, 4)))
    message = f"{name}: expected shape (3, 2, 2, 4), a row for each slot, got {shape}"
    with pytest.raises(ValueError, match=re.escape(message)):
        pages.write(jnp.zeros((3, 2), jnp.int32), **rows | {name: jnp.ones(shape)})
    with pytest.raises(ValueError, match=r"target: expected shape \(3, 2\), that of source, got \(3, 1\)"):
        pages.move(jnp.zeros((3, 2), jnp.int32), jnp.zeros((3, 1), jnp.int32))


def test_page_ids_that_are_not_integers_are_refused():
    with pytest.raises(ValueError, match="taken: expected a list of integers, got float64"):
        PagePool.create(4, np.asarray([0.5, 1.9]))
    with pytest.raises(ValueError, match="pages: expected a list of integers, got float64"):
        PagePool.create(4, np.asarray([0])).release(np.asarray([0.7]))


def test_a_jitted_step_appends_a_token_to_every_request_of_a_forest():
    forest = Forest.from_nodes([-1, 0], [11, 4], [1, 1], page_size=PAGE_SIZE, request_capacity=3)
    forest, _ = forest.reserve(PagePool.create(NUM_PAGES, taken=forest.used_pages), 2)

    @jax.jit
    def step(forest, pages, row):
        forest = forest.extend(1)
        return forest, pages.write(forest.slots(1), row, 2 * row)

    pages = KVPages.zeros(NUM_PAGES, PAGE_SIZE, HEADS, DIM)
    expected = np.zeros((NUM_PAGES * PAGE_SIZE, HEADS, DIM))
    for number in (1, 2):
        row = rows((3, 1), number)
        forest, pages = step(forest, pages, row)
        host = jax.device_get(forest)
        for request in (0, 1):
            expected[host.context_slots(request)[-1]] = row[request, 0]
    assert len({int(slot) for request in (0, 1) for slot in host.context_slots(request)[-2:]}) == 4
    np.testing.assert_array_equal(np.asarray(pages.key, np.float32).reshape(expected.shape), expected)
    np.testing.assert_array_equal(np.asarray(pages.value, np.float32).reshape(expected.shape), 2 * expected)
