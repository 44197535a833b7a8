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
from simulator import any_above, fold_columns, gather

from pallas_kernels import by_thread, by_warp
from pallas_kernels.ampere import instructions, pac, pac_compute, pac_load, products
from pallas_kernels.ampere.pac_load import Ahead
from pallas_kernels.ampere.pac_work import Work

_RINGS = ("key_ring", "value_ring")


def simulate(monkeypatch: pytest.MonkeyPatch, params: Any) -> None:
    """Let the kernels run in the interpreter."""
    monkeypatch.setattr(plgpu, "kernel", partial(plgpu.kernel, interpret=params))
    monkeypatch.setattr(by_thread, "gather", gather)
    monkeypatch.setattr(by_warp, "any_above", any_above)
    monkeypatch.setattr(by_warp, "fold_columns", fold_columns)
    for function in (keep, copy_rows, wait_for_threads, store_rows):
        monkeypatch.setattr(instructions, function.__name__, function)
    for function in (warp, has_rows, seen, multiply_keys, as_operands, multiply_values):
        monkeypatch.setattr(products, function.__name__, function)
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


def keep(ref: Any, numbers: jax.Array) -> None:
    """Store the numbers of the threads that there is room for."""
    ref[...] = numbers[: ref.shape[0]]


def copy_rows(rows: Any, *copies: tuple[Any, Any]) -> None:
    """Copy rows at once, and zeros past their ends; those that do not exist become NaN."""
    for source, target in copies:
        copied = source[...].at[rows[...][: target.shape[0]]].get(mode="fill", fill_value=jnp.nan)
        target[...] = jnp.pad(copied, ((0, 0), (0, target.shape[1] - copied.shape[1])))


def wait_for_threads() -> None:
    """There is one."""


def warp() -> jax.Array:
    """Return any number: there is one thread for all warps."""
    return jnp.int32(0)


def has_rows(rows: Any, warp: jax.Array) -> jax.Array:
    """Leave nothing out, as warps do not branch on their own here."""
    del rows, warp
    return jnp.int32(1)


def seen(readers: Any, tokens: int, warp: jax.Array, first_row: int) -> jax.Array:
    """Leave nothing out."""
    del warp, first_row
    return 1 + jnp.all(readers[...][:tokens] == readers[0]).astype(jnp.int32)


def multiply_keys(queries: list[Any], keys: Any) -> list[jax.Array]:
    """Return the products of tiles of the query and a block of keys, [64, block] each."""
    return [_multiply(query[...], keys[...].T) for query in queries]


def as_operands(weights: jax.Array, dtype: Any) -> list[jax.Array]:
    """Round weights [64, block]."""
    return [weights.astype(dtype)]


def multiply_values(accs: list[list[jax.Array]], weights: list[list[jax.Array]], values: Any) -> list[list[jax.Array]]:
    """Add the products of tiles' weights [64, block] and a block of values to their accumulators, [64, 64] each."""
    added = [_multiply(of_tile, values[...]) for (of_tile,) in weights]
    return [
        [acc + part for acc, part in zip(of_tile, jnp.split(product, len(of_tile), axis=1), strict=True)]
        for of_tile, product in zip(accs, added, strict=True)
    ]


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
