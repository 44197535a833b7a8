"""A stand-in for `instructions` where the GPU interpreter of Pallas runs the Ampere kernels on a CPU.

The interpreter has one thread for the four warps of a thread block, so it cannot tell whether one waits for another.
It is made to tell whether copies are waited for: a block goes to a ring that nobody else knows, the place where
it belongs becomes NaN when its copy begins, and gets the block when it is waited for. All else is the code that runs on
a GPU, but for the products, the rounding of their operands, and the addresses of copies, loads and stores by thread.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest
from jax import lax

from pallas_kernels.ampere import instructions, pac, pac_compute, pac_load, products
from pallas_kernels.ampere.pac_load import Ahead
from pallas_kernels.ampere.pac_work import Work

_RINGS = ("key_ring", "value_ring")


def simulate(monkeypatch: pytest.MonkeyPatch, params: Any) -> None:
    """Let the kernels run in the interpreter."""
    monkeypatch.setattr(plgpu, "kernel", partial(plgpu.kernel, interpret=params))
    for function in (gather, keep, copy_rows, wait_for_threads, store_rows):
        monkeypatch.setattr(instructions, function.__name__, function)
    for function in (warp, slabs_in_use, slabs_of_readers, load_rows, load_tokens, multiply_keys, multiply_values):
        monkeypatch.setattr(products, function.__name__, function)
    monkeypatch.setattr(products, "swap_halves", lambda memory, numbers, layout: jnp.roll(numbers, 32, axis=0))
    monkeypatch.setattr(instructions, "commit_copies", lambda: None)
    monkeypatch.setattr(instructions, "wait_for_copies", lambda in_flight: None)
    scratch, copy_block = pac._scratch, pac_load.copy_block

    def with_blocks_on_their_way(sizes: Any) -> dict[str, Any]:
        described = scratch(sizes)
        return described | {f"{ring}_on_its_way": described[ring] for ring in _RINGS}

    def copy_out_of_sight(work: Work, ahead: Ahead) -> Ahead:
        refs = dict(vars(work.refs))
        hidden = SimpleNamespace(**refs | {ring: refs[f"{ring}_on_its_way"] for ring in _RINGS})

        @pl.when(ahead.segment < work.last)
        def _lose_what_was_there() -> None:
            for ring in _RINGS:
                place = refs[ring].at[work.stage(ahead.number)]
                place[...] = jnp.full(place.shape, jnp.nan, place.dtype)

        elsewhere = object.__new__(Work)
        vars(elsewhere).update(vars(work) | {"refs": hidden})
        return copy_block(elsewhere, ahead)

    def wait_for_block(work: Work, number: jax.Array) -> None:
        for ring in _RINGS:
            arrived = getattr(work.refs, f"{ring}_on_its_way").at[work.stage(number)]
            getattr(work.refs, ring).at[work.stage(number)][...] = arrived[...]

    monkeypatch.setattr(pac, "_scratch", with_blocks_on_their_way)
    for module in (pac_load, pac_compute):
        monkeypatch.setattr(module, "copy_block", copy_out_of_sight)
    monkeypatch.setattr(pac_compute, "wait_for_block", wait_for_block)


def gather(ref: Any, index: jax.Array) -> jax.Array:
    """Load a number for each thread; an index that is none gives a number that is none."""
    return ref[...].at[index].get(mode="fill", fill_value=1 << 30)


def keep(ref: Any, numbers: jax.Array) -> None:
    """Store the numbers of the threads that there is room for."""
    ref[...] = numbers[: ref.shape[0]]


def copy_rows(source: Any, rows: Any, target: Any) -> None:
    """Copy rows at once, and zeros past their ends; those that do not exist become NaN."""
    copied = source[...].at[rows[...][: target.shape[0]]].get(mode="fill", fill_value=jnp.nan)
    target[...] = jnp.pad(copied, ((0, 0), (0, target.shape[1] - copied.shape[1])))


def wait_for_threads() -> None:
    """There is one."""


def warp() -> jax.Array:
    """Return any number: there is one thread for all warps."""
    return jnp.int32(0)


def slabs_in_use(rows: Any, split: int, warp: jax.Array) -> jax.Array:
    """Name all slabs, as warps do not branch on their own here."""
    del rows, warp
    return jnp.int32((1 << split) - 1)


def slabs_of_readers(readers: Any, tokens: int, split: int, warp: jax.Array) -> jax.Array:
    """Name all slabs."""
    del readers, tokens
    return slabs_in_use(None, split, warp)


def load_rows(ref: Any, first: jax.Array, slab: int, split: int) -> jax.Array:
    """Load a number for each row of a slab."""
    return _of_slab(ref[pl.ds(first, 64)], slab, split)


def load_tokens(ref: Any, split: int, warp: jax.Array) -> jax.Array:
    """Repeat a number of each token along the rows that see it."""
    del warp
    return jnp.repeat(ref[...].reshape(split, -1), 64 // split, axis=0)


def multiply_keys(query: Any, keys: Any, slabs: Any, split: int, warp: jax.Array) -> list[jax.Array]:
    """Return the products of the rows of each slab, and of the tokens that are their warps'."""
    del warp
    scores = _multiply(query[...], keys[...].T)  # [64, block]
    return [_own_columns(_of_slab(scores, slab, split), split) for slab in slabs]


def multiply_values(
    accs: list[list[jax.Array]], weights: list[jax.Array], values: Any, split: int, warp: jax.Array
) -> list[list[jax.Array]]:
    """Add the products of the weights of each slab to its accumulators, [64, 64] each."""
    del warp
    added = []
    for of_slab, own in zip(accs, weights, strict=True):
        parts = zip(jnp.split(own.astype(values.dtype), split), jnp.split(values[...], split), strict=True)
        products_ = jnp.concatenate([_multiply(weights, tokens) for weights, tokens in parts])
        columns = jnp.split(products_, len(of_slab), axis=1)
        added.append([acc + part for acc, part in zip(of_slab, columns, strict=True)])
    return added


def _of_slab(rows: jax.Array, slab: int, split: int) -> jax.Array:
    """Take the rows of a slab, of the tile's 64."""
    return rows if split == 1 else jnp.concatenate([rows[32 * slab : 32 * slab + 32]] * 2)


def _own_columns(scores: jax.Array, split: int) -> jax.Array:
    """Keep the tokens that a row's warp has: [64, block] to [64, block / split]."""
    own = scores.shape[1] // split
    return jnp.concatenate([part[:, i * own :][:, :own] for i, part in enumerate(jnp.split(scores, split))])


def store_rows(target: Any, places: jax.Array, rows: jax.Array, layout: Any) -> None:
    """Store rows one after another."""
    del layout
    for i in range(rows.shape[0]):
        place = places[i, 0]

        @pl.when(place >= 0)
        def _store(i: int = i, place: jax.Array = place) -> None:
            target[place] = rows[i, : target.shape[1]]


def _multiply(left: jax.Array, right: jax.Array) -> jax.Array:
    """Multiply two matrices, with float32 products and sums."""
    return lax.dot_general(left, right, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
