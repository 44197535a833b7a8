"""A workload made concrete: its arrays, our call on them, and float32 attention that every result is held to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from benchmarks.turns import compiled_once, forget_compiled
from benchmarks.workloads import Workload
from codec_jax import Forest, Plan, make_plan
from codec_jax.arrays import bucket
from codec_jax.attention import forest_attention
from codec_jax.planning.division import Policy
from pallas_kernels import AMPERE, Heads

#: Rounding the output and the probabilities to bfloat16 costs 0.002; dropping 16 of 120,000 tokens would cost 0.01.
MAX_RELATIVE_ERROR = 5e-3

MAX_DENSE_BYTES = 60e9  # what the unshared copies of K and V may take

#: Arrays have room for at least this much, then for the next bucket: forests of about one size share their programs.
MIN_NODES, MIN_PAGES_OF_NODES, MIN_POOL_PAGES, MIN_BLOCKS, MIN_CONTEXT = 256, 1 << 18, 1024, 1 << 14, 1024


class Layout(NamedTuple):
    """Heads and pages."""

    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16

    @property
    def heads(self) -> dict[str, int]:
        """The arguments of make_plan."""
        return {name: getattr(self, name) for name in ("num_q_heads", "num_kv_heads", "head_dim")}

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of the K and V of one token in bfloat16, all kv heads."""
        return 2 * 2 * self.num_kv_heads * self.head_dim


class Case(NamedTuple):
    """A workload under a layout: a row of a result file, and a point of the figure that is drawn from it."""

    workload: Workload
    layout: Layout = Layout()
    series: str | None = None  # the chart that the point is in
    x: float | None = None  # where it is there


class Variant(NamedTuple):
    """What a layer does to attention."""

    softcap: float | None = None
    sinks: bool = False
    window: int | None = None
    kv_dtype: Any = jnp.bfloat16

    def sinks_of(self, num_q_heads: int) -> Float[Array, " N"] | None:
        """Return a sink for each q head, if there are any."""
        return jnp.linspace(-2.0, 6.0, num_q_heads) if self.sinks else None

    def stored(self, pages: Float[Array, "num_pages page_size K H"]) -> Float[Array, "num_pages page_size K H"]:
        """Return pages in the dtype that they are kept in."""
        return pages if pages.dtype == self.kv_dtype else _converted(pages, self.kv_dtype)


PLAIN = Variant()


class Inputs(NamedTuple):
    """A forest, one query token for each request, and pages."""

    forest: Forest
    query: Float[Array, "B 1 N H"]
    key_pages: Float[Array, "num_pages page_size K H"]
    value_pages: Float[Array, "num_pages page_size K H"]


def make_inputs(workload: Workload, layout: Layout) -> Inputs:
    """Draw bfloat16 inputs; the same ones whenever and in whichever process they are drawn."""
    forest = with_room(Forest.from_nodes(workload.parent, workload.length, workload.leaf, page_size=layout.page_size))
    num_pages = bucket(int(forest.used_pages.max()) + 1, MIN_POOL_PAGES)
    pages = (num_pages, layout.page_size, layout.num_kv_heads, layout.head_dim)
    query = (len(workload.leaf), 1, layout.num_q_heads, layout.head_dim)
    keys = jax.random.split(jax.random.key(0), 3)
    key, value = (_normal(k, pages) for k in keys[:2])
    return Inputs(forest, _normal(keys[2], query), key, value)


@functools.partial(jax.jit, static_argnames="dtype")
def _converted(pages: Array, dtype: Any) -> Array:
    return pages.astype(dtype)


def _normal(key: Array, shape: tuple[int, ...]) -> Array:
    """Draw an array by itself: random bits take several times its memory."""
    return compiled_once(_draw(shape), key)(key)


@functools.cache
def _draw(shape: tuple[int, ...]) -> Callable[[Array], Array]:
    return jax.jit(functools.partial(jax.random.normal, shape=shape, dtype=jnp.bfloat16))


def with_room(forest: Forest) -> Forest:
    """Pad a forest's nodes and their pages as a server does that lets it grow."""
    tree = forest.tree
    node_capacity, page_capacity = bucket(len(tree.parent), MIN_NODES), bucket(len(tree.page_ids), MIN_PAGES_OF_NODES)
    return Forest.build(tree, node_capacity=node_capacity, page_capacity=page_capacity)


@functools.cache
def attend_with(implementation: str | None) -> Callable[..., Array]:
    """Return the jitted forest_attention of an implementation."""
    return jax.jit(functools.partial(forest_attention, implementation=implementation))


def forget_programs() -> None:
    """Trace and compile anew from here on, since the kernels' sizes have changed."""
    attend_with.cache_clear()
    forget_compiled()


def planned_call(
    inputs: Inputs, layout: Layout, implementation: str | None, policy: Policy = "aligned"
) -> tuple[Callable[[], Array], Plan]:
    """Plan and put everything on the device; return forest_attention's call and its plan."""
    sizes = ampere_sizes(layout) if implementation == AMPERE.name else {}
    plan = make_plan(inputs.forest, **layout.heads, block_capacity=MIN_BLOCKS, policy=policy, **sizes)
    forest, *arrays = inputs
    on_device = jax.device_put((*arrays, forest, plan))
    attend = compiled_once(attend_with(implementation), *on_device, tuned=implementation == "xla")
    return lambda: attend(*on_device), plan


def ampere_sizes(layout: Layout) -> dict[str, int]:
    """Return what plans for those kernels say of sizes, also on a device that has faster kernels."""
    heads = Heads(layout.num_q_heads, layout.num_kv_heads, layout.head_dim, layout.head_dim)
    tiling = AMPERE.tiling(heads, jax.devices()[0])
    sizes = {name: getattr(tiling, name) for name in ("num_ctas", "tile_rows", "lanes")}
    return sizes | {"block_tokens": tiling.block_tokens[0]}


def padded_slots(forest: Forest) -> np.ndarray:
    """Return every request's token slots, padded with 0 to the longest context in whole tiles of 64: int32 [B, S]."""
    longest = -(-int(forest.request_length.max()) // 64) * 64
    slots = np.zeros((forest.request_capacity, longest), np.int32)
    for request in range(len(slots)):
        own = forest.context_slots(request)
        slots[request, : len(own)] = own
    return slots


def check_copies(size: float) -> None:
    """Raise ValueError where unshared copies of K and V would take more than `MAX_DENSE_BYTES`."""
    if size > MAX_DENSE_BYTES:
        raise ValueError(f"expected at most {MAX_DENSE_BYTES / 1e9:.0f} GB of unshared KV, got {size / 1e9:.0f} GB")


def check_room(size: float) -> None:
    """Raise MemoryError where JAX may not take so many bytes more on the device, rather than wait for them in vain."""
    memory = jax.local_devices()[0].memory_stats()
    room = memory["bytes_limit"] - memory["bytes_in_use"] if memory else size
    if size > room:
        raise MemoryError(
            f"expected {size / 1e9:.1f} GB of room on the device, got {room / 1e9:.1f} GB; "
            "XLA_PYTHON_CLIENT_MEM_FRACTION is the share of its memory that JAX may take"
        )


def reference(inputs: Inputs) -> Float[np.ndarray, "B N H"]:
    """Attend in float32, each request by itself over a copy of its own context."""
    forest, query, key, value = inputs
    slots = padded_slots(forest)
    slots = np.pad(slots, ((0, 0), (0, bucket(slots.shape[1], MIN_CONTEXT) - slots.shape[1])))
    arguments = query, key, value, slots, forest.request_length
    return np.asarray(compiled_once(_attend_in_float32, *arguments)(*arguments))


@jax.jit
def _attend_in_float32(query: Array, key: Array, value: Array, slots: Array, length: Array) -> Array:
    def one(request: tuple[Array, Array, Array]) -> Array:
        query, slots, length = request
        own = (x.reshape(-1, *x.shape[2:])[slots].astype(jnp.float32) for x in (key, value))
        mask = (jnp.arange(len(slots)) < length)[None, None]
        return jax.nn.dot_product_attention(query.astype(jnp.float32), *own, mask=mask)[0]

    # One request at a time: float32 copies of all contexts may not fit.
    with jax.default_matmul_precision("highest"):
        return jax.lax.map(one, (query, slots, length))


def check(
    out: Float[np.ndarray, "B N H"], expected: Float[np.ndarray, "B N H"], most: float = MAX_RELATIVE_ERROR
) -> float:
    """Return the largest relative error of a request, by the norm over its heads.

    Raises ValueError if it is more than `most`, or not a number.
    """
    difference = np.asarray(out, np.float32).reshape(expected.shape) - expected
    error = float(np.max(np.linalg.norm(difference, axis=(1, 2)) / np.linalg.norm(expected, axis=(1, 2))))
    if not error <= most:
        raise ValueError(f"out: expected a relative error of at most {most}, got {error:.3g}")
    return error
