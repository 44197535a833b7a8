"""Calls of the Hopper kernels, and what they should give: float64 attention of each request alone."""

from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from forests import Tree, ancestry, first_seen

from codec_jax import DraftTrees, Forest, Plan, make_plan
from codec_jax.attention import forest_attention
from codec_jax.planning import arrays_of
from pallas_kernels import HOPPER, Call, Family, Scores
from pallas_kernels import Heads as AllHeads
from pallas_kernels.hopper.tiling import BLOCKS

PAGES = 192
NODES = 128
H200 = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H200", core_count=132)
#: Of random numbers in heads of 512, products are large; with a smaller scale the weights are of several tokens.
LONG_SCALE = 0.02
#: The tensor cores keep some 13 bits of a sum of products of 8 bits.
FEW_BITS = 2.0**-13
attend = jax.jit(forest_attention, static_argnames=("scale", "softcap", "implementation", "return_residuals"))
attend_mosaic = partial(attend, implementation="mosaic")


class Heads(NamedTuple):
    q: int
    kv: int
    dim: int
    values: int | None = None  # the size of values, where it is another

    @property
    def value_dim(self) -> int:
        return self.dim if self.values is None else self.values


def plan_of(forest: Forest, heads: Heads, family: Family = HOPPER, **changed: Any) -> Plan:
    """Plan as a family wants it on this GPU, or on an H200 where there is none.

    Forests of up to PAGES pages and one tile or a few share a compilation. Heads that a family does not take are cut as
    those of 128.
    """
    device = jax.devices()[0] if jax.default_backend() == "gpu" else H200
    wanted = AllHeads(heads.q, heads.kv, heads.dim, heads.value_dim)
    if family.why_not(wanted, device):
        wanted = AllHeads(heads.q, heads.kv, 128, 128)
    tiling = family.tiling(wanted, device)
    options = {
        "num_ctas": tiling.num_ctas,
        "tile_rows": tiling.tile_rows,
        "block_tokens": tiling.block_tokens[-1],
        "lanes": tiling.lanes,
        "min_wide_tokens": 24,
        "block_capacity": 256,
        "num_q_heads": heads.q,
        "num_kv_heads": heads.kv,
        "head_dim": heads.dim,
        "value_head_dim": heads.value_dim,
    }
    return make_plan(forest, **(options | changed))


def attend_hopper(
    query: Any,
    key_pages: Any,
    value_pages: Any,
    forest: Forest,
    plan: Plan,
    readers: Any = None,
    positions: Any = None,
    scales: Any = (None, None),
    softcap: float | None = None,
) -> Any:
    """The output of the kernels, without what `forest_attention` does around them."""
    forest = jax.tree.map(jnp.asarray, forest)
    position, arrays = forest.positions(query.shape[1]), arrays_of(forest)
    call = Call(query, key_pages, value_pages, position, arrays, plan.arrays, plan.guard, readers, positions)
    of_tokens = "_of_tokens" if scales[0] is not None and scales[0].ndim == 3 else ""
    call = call._replace(**{f"key_scale{of_tokens}": scales[0], f"value_scale{of_tokens}": scales[1]})
    return HOPPER.attend(call, Scores(0.1, softcap))[0]


#: Heads of every size, each with every block that the kernels have for it.
CONFIGS = [
    (Heads(32, 8, keys, None if values == keys else values), tokens)
    for (keys, values), blocks in BLOCKS.items()
    for tokens in sorted({block.tokens for block in blocks})
]

#: The same of heads whose rows are longer in shared memory than in pages.
PADDED_CONFIGS = [(Heads(32, 32, 96), 64), (Heads(32, 8, 112), 128)]


class Arrays(NamedTuple):
    """A query and pages. What no request reads is as large as the dtype allows; a free request slot's query is NaN."""

    query: jax.Array
    key_pages: jax.Array
    value_pages: jax.Array

    @classmethod
    def random(
        cls,
        forest: Forest,
        heads: Heads,
        dtype: Any,
        seed: int,
        query_tokens: int = 1,
        num_pages: int = PAGES,
        kv_dtype: Any = None,
    ) -> "Arrays":
        kv_dtype = dtype if kv_dtype is None else kv_dtype
        rng = np.random.default_rng(seed)
        query = rng.normal(size=(forest.request_capacity, query_tokens, heads.q, heads.dim))
        query[~forest.active] = np.nan
        read = [forest.context_slots(request) for request in np.flatnonzero(forest.active)]
        slots = np.unique(np.concatenate(read))
        pages = []
        for sign, head_dim in ((1, heads.dim), (-1, heads.value_dim)):
            shape = (num_pages * forest.page_size, heads.kv, head_dim)
            tokens = np.full(shape, sign * float(jnp.finfo(kv_dtype).max), np.float32)
            tokens[slots] = rng.standard_normal(size=(len(slots), *shape[1:]), dtype=np.float32)
            pages.append(jnp.asarray(tokens, kv_dtype).reshape(num_pages, forest.page_size, *shape[1:]))
        return cls(jnp.asarray(query, dtype), *pages)

    def with_small_rows(self) -> "Arrays":
        """Make the first q head's row 0 in the first request slot, and as good as 0 in the second one."""
        query = self.query.at[0, :, 0].multiply(0)
        return self._replace(query=query.at[1:2, :, 0].multiply(2.0**-30))

    def with_slopes(self, forest: Forest, most: float) -> "Arrays":
        """Let scores rise along contexts for some q heads, and fall for others: slowly, fast, and in one jump.

        `most` is by how many the scores change at most, in units of the natural logarithm.
        """
        query, keys, values = self
        top, longest = 448.0, int(forest.request_length.max())  # the largest number of float8_e4m3fn
        flat = np.asarray(keys, np.float32).reshape(-1, *keys.shape[2:])
        for request in np.flatnonzero(forest.active):
            slots = forest.context_slots(request)
            along = np.arange(len(slots)) / longest
            flat[slots, :, 0] = (top * np.where(along < 0.6, along / 2, along))[:, None]
        slopes = most / top * query.shape[3] ** 0.5 * np.asarray([0.0, 1.0, -1.0, 0.03, -0.03, 0.3])
        of_heads = np.resize(slopes, query.shape[2])[None, None].repeat(query.shape[1], 1)
        changed = query.at[forest.active, :, :, 0].set(jnp.asarray(of_heads, query.dtype))
        return Arrays(changed, jnp.asarray(flat, keys.dtype).reshape(keys.shape), values)


class Exact(NamedTuple):
    """Attention of one request's T tokens in float64: [T, N, V], [T, N] and [T, N, V]."""

    out: np.ndarray
    logsumexp: np.ndarray  # -inf where a token sees nothing
    error: np.ndarray  # what rounding the weights and the result to the dtype may cost

    @classmethod
    def of(
        cls,
        arrays: Arrays,
        forest: Forest,
        request: int,
        scale: float | None = None,
        parent: list[int] | None = None,
        *,
        softcap: float | None = None,
        window: Any = None,
        sinks: Any = None,
        scales: Any = (1.0, 1.0),
        lost: float = 0.0,
    ) -> "Exact":
        eps = float(jnp.finfo(arrays.query.dtype).eps)
        query = np.asarray(arrays.query[request], np.float64)
        tokens, q_heads, head_dim = query.shape
        slots = forest.context_slots(request)
        kv_heads = arrays.key_pages.shape[2]
        key, value = (
            np.asarray(np.asarray(pages).reshape(-1, kv_heads, pages.shape[3])[slots], np.float64).transpose(1, 0, 2)
            * _factors(scale, kv_heads, slots)
            for pages, scale in zip(arrays[1:], scales, strict=True)
        )
        rows = query.reshape(tokens, kv_heads, -1, head_dim).transpose(1, 2, 0, 3)  # [K, G, T, H]
        scores = rows @ key[:, None].swapaxes(2, 3) * (head_dim**-0.5 if scale is None else scale)
        largest = np.abs(scores).max(axis=-1, keepdims=True, initial=0)
        scores = scores if softcap is None else np.tanh(scores / softcap) * softcap
        first = len(slots) - tokens
        position, query_position = np.arange(len(slots)), first + np.arange(tokens)
        visible = position <= query_position[:, None]
        if parent is not None:
            visible[:, first:] = [[t in ancestry(parent, i) for t in range(tokens)] for i in range(tokens)]
            position[first:] = query_position = [first + len(ancestry(parent, i)) - 1 for i in range(tokens)]
        visible &= position >= np.asarray([first_seen(window, int(at)) for at in query_position])[:, None]
        scores = np.where(visible, scores, -np.inf)
        if sinks is not None:  # one more key in the place of a sink, with a value of 0
            sink = np.asarray(sinks, np.float64).reshape(kv_heads, -1)[..., None, None]
            scores = np.concatenate([scores, np.broadcast_to(sink, (*scores.shape[:3], 1))], -1)
            value = np.pad(value, ((0, 0), (0, 1), (0, 0)))
        most = np.maximum(scores.max(axis=-1, keepdims=True, initial=-np.inf), -1e300)
        weights = np.exp(scores - most)
        total = weights.sum(axis=-1, keepdims=True)
        weights = weights / np.where(total, total, 1.0)
        out, size = (
            (weights @ v[:, None]).transpose(2, 0, 1, 3).reshape(tokens, q_heads, -1) for v in (value, np.abs(value))
        )
        with np.errstate(divide="ignore"):
            logsumexp = (np.where(total, most, 0.0) + np.log(total))[..., 0]
        # Half of eps each for weights, result, and the result with sinks, and a little for float32 sums and exp2.
        error = (1.05 if sinks is None else 1.55) * eps * size + 1e-5
        # What is lost of a score, weights and their sum lose each.
        error += 2 * lost * largest.transpose(2, 0, 1, 3).reshape(tokens, q_heads, 1) * size
        return cls(out, logsumexp.transpose(2, 0, 1).reshape(tokens, q_heads), error)


def _factors(scale: Any, kv_heads: int, slots: np.ndarray) -> np.ndarray:
    """Return factors on the numbers of tokens, [K, S, 1] or [K, 1, 1], from those of heads or of tokens and heads."""
    scale = np.asarray(scale, np.float64)
    if scale.ndim < 3:
        return np.broadcast_to(scale, kv_heads)[:, None, None]
    return scale.transpose(1, 0, 2).reshape(kv_heads, -1)[:, slots, None]


def token_scales(arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """Scales of each token and kv head, 2^-6 to 1, in no order; where no request reads NaN for keys, 32 for values."""
    largest, rng, scales = float(jnp.finfo(arrays.key_pages.dtype).max), np.random.default_rng(1), []
    for pages, unread in zip(arrays[1:], (np.nan, 32.0), strict=True):
        is_read = np.abs(np.asarray(pages[..., 0], np.float32)) < largest
        scale = np.where(is_read, 2.0 ** rng.uniform(-6, 0, is_read.shape), unread)
        scales.append(jnp.asarray(scale.transpose(0, 2, 1), jnp.float32))
    return scales[0], scales[1]


def check(
    arrays: Arrays,
    forest: Forest,
    plan: Plan,
    *,
    requests: Any = None,
    scale: float | None = None,
    implementation: str = "mosaic",
    parent: list[list[int]] | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    scales: Any = (None, None),
    lost: float = 0.0,
) -> None:
    """Compare output and residuals of some requests, or of all, with float64 attention; free request slots give 0.

    `lost` is which share of a row's largest score products may lose, where scores are so large that it counts.
    `parent` gives each request's candidates the candidate above them, in depth-first order. The window is the plan's.
    """
    drafts = None if parent is None else DraftTrees.from_parents(np.asarray(parent))
    given = {"scale": scale, "softcap": softcap, "sinks": sinks}
    out, residuals = attend(
        *arrays, forest, plan, drafts=drafts, implementation=implementation, return_residuals=True,
        key_scale=scales[0], value_scale=scales[1], **given,
    )  # fmt: skip
    assert out.dtype == arrays.query.dtype
    out, row_max, row_sum = (np.asarray(x, np.float64) for x in (out, *residuals))
    free = ~np.asarray(forest.active)
    assert (out[free] == 0).all()
    assert (row_max[free] == (-np.inf if sinks is None else np.asarray(sinks, np.float32))).all()
    assert (row_sum[free] == (sinks is not None)).all()
    for request in np.flatnonzero(forest.active) if requests is None else requests:
        above = None if parent is None else parent[request]
        factors = [1.0 if factor is None else factor for factor in scales]
        exact = Exact.of(
            arrays, forest, request, parent=above, window=plan.arrays.window, scales=factors, lost=lost, **given
        )
        excess = np.abs(out[request] - exact.out) - exact.error
        assert excess.max() <= 0, f"request {request}: error is {excess.max()} more than {exact.error.max()}"
        with np.errstate(divide="ignore"):
            logsumexp = row_max[request] + np.log(row_sum[request])
        # The tensor cores keep some 13 bits of a sum of products of 8 bits: less is lost than by weights in bfloat16.
        atol = 1e-4 if arrays.key_pages.dtype.itemsize > 1 else 2e-3
        np.testing.assert_allclose(logsumexp, exact.logsumexp, atol=atol, rtol=max(1e-6, lost))


def grown(tree: Tree, page_size: int = 16, seed: int | None = None, **capacities: int) -> Forest:
    """The tree as a forest of fixed capacities, on scattered pages if there is a seed."""
    forest = Forest.from_nodes(*tree, page_size=page_size, **capacities)
    pages = np.arange(PAGES) if seed is None else np.random.default_rng(seed).permutation(PAGES)
    tree_ = forest.tree._replace(page_ids=pages[forest.used_pages])
    return Forest.build(tree_, node_capacity=NODES, page_capacity=PAGES)


# One request ends at an inner node, two at the same leaf; nodes without tokens, of one token, and of full blocks.
TREE = Tree([-1, 0, 0, 1, -1, 4], [300, 40, 0, 129, 1, 64], [3, 2, 1, 3, 5, 4, 0])

# Six requests whose leaves lie side by side in one tile, so that each row passes over the pages of the others.
SIX = Tree([-1, *[0] * 6], [100, 5, 17, 30, 128, 1, 64], list(range(1, 7)))
