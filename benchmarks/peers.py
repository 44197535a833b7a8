"""FlashInfer, FlashAttention-3 and FlexAttention on the same forests, K and V and queries.

    FlashInfer decode   a request's page table lists the pages of all nodes on its path: what is shared is stored once
    FlashInfer cascade  one level for each depth of the tree; a node is an entry of its level, with its readers' queries
    FlashInfer MLA      as its decode, over latents (benchmarks/latent.py)
    FlashAttention-3    each request has a contiguous copy of its context (benchmarks/flash_attention.py)
    FlexAttention       all pages are one long context, of which a mask says who reads what (benchmarks/flex.py)

All but FlashAttention-3 read the pages where JAX has put them, with requests in depth-first order. Plans and the tables
are made before anything is timed. Kernels do not start before the last one has ended, since their wait would count as
work. Peers and torch stay in a process of their own: a kernel that fails takes only that one along.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from benchmarks import flash_attention, flex
from benchmarks.inputs import MAX_RELATIVE_ERROR, PLAIN, Inputs, Layout, Variant, check, make_inputs
from benchmarks.rows import reason
from benchmarks.timing import kernel_time
from benchmarks.turns import GPU
from benchmarks.workloads import Workload
from codec_jax import Forest
from codec_jax.arrays import expand
from codec_jax.forest.depth_first import depths

if TYPE_CHECKING:
    import torch

_WORKSPACE_BYTES = 1 << 30
_PARTIALS_BYTES = 2 << 30  # of the persistent kernel, most with a q head for each kv head
_CUDA_CORE_GROUPS = 1, 2, 3, 4, 8  # q heads per kv head
_LATENT = 512  # numbers of a latent


class PageTable(NamedTuple):
    """The entries of a batch: how many rows (requests, depth first) attend to which pages."""

    row_ptr: Int[np.ndarray, " entries+1"]
    page_ptr: Int[np.ndarray, " entries+1"]
    pages: Int[np.ndarray, " pages"]
    last_page_tokens: Int[np.ndarray, " entries"]
    page_size: int

    @classmethod
    def of(cls, entries: list[tuple[int, np.ndarray, int]], page_size: int) -> PageTable:
        """Lay (rows, pages, tokens) end to end, leaving out entries without rows; tokens may be 0."""
        rows, pages, tokens = zip(*(entry for entry in entries if entry[0]), strict=True)
        return cls(
            row_ptr=np.cumsum([0, *rows], dtype=np.int32),
            page_ptr=np.cumsum([0, *map(len, pages)], dtype=np.int32),
            pages=np.concatenate(pages).astype(np.int32),
            last_page_tokens=np.asarray(
                [count - max(len(own) - 1, 0) * page_size for own, count in zip(pages, tokens, strict=True)], np.int32
            ),
            page_size=page_size,
        )

    @property
    def tokens(self) -> Int[np.ndarray, " entries"]:
        """Tokens of each entry."""
        pages = np.diff(self.page_ptr)
        return np.where(pages > 0, (pages - 1) * self.page_size + self.last_page_tokens, 0).astype(np.int32)

    @property
    def listed(self) -> Int[np.ndarray, "entries most_pages"]:
        """The pages of each entry in a row of a table; 0 where it has no more."""
        pages = np.diff(self.page_ptr)
        table = np.zeros((len(pages), pages.max()), np.int32)
        table[expand(pages)] = self.pages
        return table


def request_table(forest: Forest) -> PageTable:
    """One entry for each request: its whole context.

    Only the last page of an entry may be partly filled. Where nodes above others end within a page, the same memory
    is addressed in the largest pages that they do fill.
    """
    inner = np.unique(forest.parent[forest.parent >= 0])
    page_size = math.gcd(forest.page_size, *map(int, forest.length[inner]))
    slots = [forest.context_slots(int(request)) for request in forest.request_of_row]
    return PageTable.of([(1, own[::page_size] // page_size, len(own)) for own in slots], page_size)


def level_tables(forest: Forest) -> list[PageTable]:
    """One table for each depth of the forest, roots first; rows whose path ends above it attend to nothing there."""
    depth, nothing = depths(forest.parent), np.zeros(0, np.int32)
    tables = []
    for level in range(int(depth.max()) + 1):
        entries, row = [], 0
        nodes = np.flatnonzero((depth == level) & (forest.row_hi > forest.row_lo))
        for node in nodes[np.argsort(forest.row_lo[nodes])]:
            lo, hi, length = int(forest.row_lo[node]), int(forest.row_hi[node]), int(forest.length[node])
            pages = forest.pages_of(node)[: -(-length // forest.page_size)]
            entries += [(lo - row, nothing, 0), (hi - lo, pages, length)]
            row = hi
        entries.append((forest.request_capacity - row, nothing, 0))
        tables.append(PageTable.of(entries, forest.page_size))
    return tables


class Tensors(NamedTuple):
    """Inputs as torch sees them, in the memory that JAX holds; queries in depth-first order."""

    forest: Forest
    query: torch.Tensor
    pages: tuple[torch.Tensor, torch.Tensor]
    workspace: torch.Tensor
    variant: Variant

    @classmethod
    def of(cls, inputs: Inputs, variant: Variant) -> Tensors:
        """Share the arrays, copying none but the query, and pages that are to be of one byte a number."""
        import torch

        forest, query, key, value = inputs
        rows = jax.block_until_ready(query[forest.request_of_row, 0])
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        pages = tuple(torch.from_dlpack(_bits(variant.stored(x))) for x in (key, value))
        if variant.kv_dtype != key.dtype:
            pages = tuple(x.view(getattr(torch, jnp.dtype(variant.kv_dtype).name)) for x in pages)
        return cls(forest, torch.from_dlpack(rows), pages, workspace, variant)

    def has_only(self, kernel: str, *fields: str) -> None:
        """Raise ValueError where a layer does something else to attention than what a kernel has."""
        asked = [name for name, default in PLAIN._asdict().items() if getattr(self.variant, name) != default]
        if missing := [name for name in asked if name not in fields]:
            raise ValueError(f"{kernel}: expected no {', '.join(missing)}")

    def pages_of(self, table: PageTable) -> tuple[torch.Tensor, torch.Tensor]:
        """Address the memory of the pages in those of a table."""
        key, value = (x.view(-1, table.page_size, *x.shape[2:]) for x in self.pages)
        return key, value


def _bits(pages: Array) -> Array:
    """Return numbers of one byte as integers, which every version of DLPack has; others as they are."""
    one_byte = pages.dtype.itemsize == 1
    return jax.block_until_ready(jax.lax.bitcast_convert_type(pages, jnp.uint8) if one_byte else pages)


Run = Callable[[], "torch.Tensor"]


def _plan(wrapper: Any, tensors: Tensors, table: PageTable, *pointers: Int[np.ndarray, " entries+1"]) -> None:
    """Plan a wrapper of FlashInfer for the table's pages; `pointers` are those to rows, if it takes any, and pages."""
    import torch

    _, num_q_heads, head_dim = tensors.query.shape
    wrapper.plan(
        *map(torch.from_numpy, (*pointers, table.pages, table.last_page_tokens)),
        num_q_heads,
        tensors.pages[0].shape[2],
        head_dim,
        table.page_size,
        q_data_type=tensors.query.dtype,
        kv_data_type=tensors.pages[0].dtype,
        logits_soft_cap=tensors.variant.softcap,
        window_left=_window_left(tensors.variant),
    )


def _window_left(variant: Variant) -> int:
    """Return how many tokens a query sees before its own; -1 for all."""
    return -1 if variant.window is None else variant.window - 1


def decode(tensors: Tensors, use_tensor_cores: bool) -> Run:
    """Plan batch decode. Raises ValueError for a group of q heads that there is no kernel for."""
    import flashinfer
    import torch

    tensors.has_only("decode", "softcap", "window", "kv_dtype")
    query, table = tensors.query, request_table(tensors.forest)
    pages = tensors.pages_of(table)
    group = query.shape[1] // pages[0].shape[2]
    if not use_tensor_cores and group not in _CUDA_CORE_GROUPS:
        raise ValueError(f"expected groups of {_CUDA_CORE_GROUPS} q heads on CUDA cores, got {group}")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(tensors.workspace, "NHD", use_tensor_cores=use_tensor_cores)
    _plan(wrapper, tensors, table, table.page_ptr)
    out = torch.empty_like(query)
    return lambda: wrapper.run(query, pages, out=out, enable_pdl=False)


def persistent(tensors: Tensors) -> Run:
    """Plan batch attention, one persistent kernel that merges what it has split, for a row of each request."""
    import flashinfer
    import torch

    tensors.has_only("persistent", "softcap", "kv_dtype")
    query, table = tensors.query, request_table(tensors.forest)
    pages = tensors.pages_of(table)
    rows, num_q_heads, head_dim = query.shape
    wrapper = flashinfer.BatchAttention("NHD")
    wrapper.float_workspace_buffer = torch.empty(_PARTIALS_BYTES, dtype=torch.uint8, device=query.device)
    wrapper.plan(
        *(torch.from_numpy(x).cuda() for x in (table.row_ptr, table.page_ptr, table.pages, table.tokens)),
        num_q_heads,
        pages[0].shape[2],
        head_dim,
        head_dim,
        table.page_size,
        q_data_type=query.dtype,
        kv_data_type=pages[0].dtype,
        logits_soft_cap=tensors.variant.softcap,
    )
    out, lse = torch.empty_like(query), torch.empty((rows, num_q_heads), dtype=torch.float32, device=query.device)
    return lambda: wrapper.run(query, pages, out=out, lse=lse)[0]


def xqa(tensors: Tensors) -> Run:
    """Make the call of TensorRT-LLM's decode kernel, which has no plan; pages of 16, 32, 64 or 128 tokens."""
    import flashinfer
    import torch

    tensors.has_only("XQA", "window", "sinks", "kv_dtype")
    query, table, sinks = tensors.query, request_table(tensors.forest), tensors.variant.sinks_of(tensors.query.shape[1])
    if table.page_size not in (16, 32, 64, 128):
        raise ValueError(f"expected pages of 16, 32, 64 or 128 tokens, inner nodes fill pages of {table.page_size}")
    pages = tensors.pages_of(table)
    page_table, lengths = (torch.from_numpy(x).cuda() for x in (table.listed, table.tokens.astype(np.uint32)))
    # It counts on zeros there and leaves them; the others' workspace is not clean.
    out, workspace = torch.empty_like(query), torch.zeros_like(tensors.workspace)
    added = None if sinks is None else torch.from_dlpack(jax.block_until_ready(sinks))

    def run() -> torch.Tensor:
        return flashinfer.decode.xqa_batch_decode_with_kv_cache(
            query,
            pages,
            workspace,
            page_table,
            lengths,
            page_table.shape[1] * table.page_size,
            bmm1_scale=query.shape[-1] ** -0.5,
            window_left=_window_left(tensors.variant),
            out=out,
            sinks=added,
            enable_pdl=False,
        )

    run()  # compiles the kernel
    return run


def cascade(tensors: Tensors, backend: str) -> Run:
    """Plan what MultiLevelCascadeAttentionWrapper runs, which has no choice of backend of its own.

    On Hopper it takes fa3, which does not split a long context over thread blocks; fa2 does. Partial results go to
    buffers made beforehand, which that wrapper clears anew for every call. For keys of one byte fa3 wants a query of
    one byte, too.
    """
    import flashinfer
    import torch

    tensors.has_only("cascade", *(("softcap", "kv_dtype") if backend == "fa2" else ("softcap",)))
    query, pages = tensors.query, tensors.pages
    levels = []
    for table in level_tables(tensors.forest):
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(tensors.workspace, "NHD", backend=backend)
        _plan(wrapper, tensors, table, table.row_ptr, table.page_ptr)
        partial = torch.empty_like(query), torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        levels.append((wrapper, partial))

    def run() -> torch.Tensor:
        for wrapper, (out, lse) in levels:
            wrapper.run(query, pages, out=out, lse=lse, return_lse=True, enable_pdl=False)
        merged = levels[-1][1]
        for _, partial in levels[:-1]:
            flashinfer.merge_state_in_place(*merged, *partial)
        return merged[0]

    return run


def mla(tensors: Tensors, backend: str) -> Run:
    """Plan batch attention over latents, absorbed, for a row of each request; the first 512 numbers are the values."""
    import torch
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    query, table = tensors.query, request_table(tensors.forest)
    _, num_q_heads, head_dim = query.shape
    latents = tensors.pages_of(table)[0][:, :, 0]
    wrapper = BatchMLAPagedAttentionWrapper(tensors.workspace, backend=backend)
    wrapper.plan(
        *(torch.from_numpy(x).cuda() for x in (table.row_ptr, table.page_ptr, table.pages, table.tokens)),
        num_q_heads,
        _LATENT,
        head_dim - _LATENT,
        table.page_size,
        causal=False,
        sm_scale=head_dim**-0.5,
        q_data_type=query.dtype,
        kv_data_type=query.dtype,
    )
    query_parts, latent_parts = (each.split([_LATENT, head_dim - _LATENT], dim=-1) for each in (query, latents))
    query_parts = [part.contiguous() for part in query_parts]
    out = torch.empty_like(query_parts[0])
    return lambda: wrapper.run(*query_parts, *latent_parts, out=out)


#: Each peer's configurations, of which the fastest counts.
PEERS: dict[str, dict[str, Callable[[Tensors], Run]]] = {
    "flashinfer_decode": {
        "tensor cores": functools.partial(decode, use_tensor_cores=True),
        "CUDA cores": functools.partial(decode, use_tensor_cores=False),
        "persistent": persistent,
        "XQA": xqa,
    },
    "flashinfer_cascade": {
        "fa2": functools.partial(cascade, backend="fa2"),
        "fa3": functools.partial(cascade, backend="fa3"),
    },
    "flashinfer_mla": {
        "fa2": functools.partial(mla, backend="fa2"),
        "fa3": functools.partial(mla, backend="fa3"),
    },
    "flash_attention": {
        "planned": lambda tensors: flash_attention.attend(*tensors[:3], planned=True),
        "scheduled by the call": lambda tensors: flash_attention.attend(*tensors[:3], planned=False),
    },
    "flex_attention": {
        "one batch": lambda tensors: flex.attend(*tensors[:3], by_request=False),
        "one batch, 64 rows a block": lambda tensors: flex.attend(*tensors[:3], by_request=False, most_rows=64),
        "by request": lambda tensors: flex.attend(*tensors[:3], by_request=True),
    },
}
FLASHINFER, OTHERS = ("flashinfer_decode", "flashinfer_cascade"), ("flash_attention", "flex_attention")
LATENTS = ("flashinfer_mla",)

#: A cascade rounds its partial results to bfloat16 at every level.
MAX_PEER_ERROR = 3 * MAX_RELATIVE_ERROR


def measure(
    workload: Workload,
    layout: Layout,
    expected: Float[np.ndarray, "B N H"],
    repeats: int,
    names: Sequence[str],
    variant: Variant,
) -> dict:
    """Check and time the peers of these names, as far as they have what a layer does to attention.

    Returns `<peer>_us` and `<peer>_relative_error` of its fastest configuration, or `<peer>_us` None and `<peer>_error`
    with the reasons; and `<peer>_configurations`, the time of each, or why it has none.
    """
    inputs = make_inputs(workload, layout)
    tensors = Tensors.of(inputs, variant)
    expected = expected[inputs.forest.request_of_row]
    # Side by side, since the first plan of a kind compiles kernels for minutes.
    with ThreadPoolExecutor() as threads:
        plans = {peer: {name: threads.submit(plan, tensors) for name, plan in PEERS[peer].items()} for peer in names}
    row: dict = {}
    for peer, configurations in plans.items():
        results = {name: _time(plan, expected, repeats) for name, plan in configurations.items()}
        times = {name: result.get("us", result.get("error")) for name, result in results.items()}
        measured = [result for result in results.values() if "us" in result]
        failed = {"us": None, "error": "; ".join(f"{name}: {time}" for name, time in times.items())}
        best = min(measured, key=lambda result: result["us"], default=failed) | {"configurations": times}
        row |= {f"{peer}_{field}": value for field, value in best.items()}
    return row


def _time(plan: Future[Run], expected: Float[np.ndarray, "B N H"], repeats: int) -> dict:
    """Check the result of a planned run, then time its kernels; whatever it cannot do is a result too."""
    import torch

    try:
        run = plan.result()
        error = check(run().float().cpu().numpy(), expected, MAX_PEER_ERROR)

        def finished() -> None:
            run()
            torch.cuda.synchronize()

        return {"us": kernel_time(finished, repeats)[0], "relative_error": error}
    except Exception as failure:
        return {"error": reason(failure)}


class Peers:
    """A process that measures the peers, and a new one after each failure, which may have spoilt the device's state."""

    def __init__(self, names: Sequence[str]) -> None:
        """Start nothing yet."""
        self.names = tuple(names)
        self._pool: ProcessPoolExecutor | None = None

    def measure(self, *arguments: object, variant: Variant = PLAIN) -> dict:
        """Call `measure` there; a process that ends gives every peer an `_error`."""
        try:
            if self._pool is None:
                self._pool = ProcessPoolExecutor(1, get_context("spawn"), initializer=share_the_device)
                with GPU.given():
                    self._pool.submit(start).result()
            row = self._pool.submit(measure, *arguments, self.names, variant).result()
        except Exception as error:
            row = {f"{peer}_us": None for peer in self.names} | {f"{peer}_error": reason(error) for peer in self.names}
        # The time of a configuration is a reason where it failed. A refusal, or a wrong result, spoils nothing.
        times = [time for peer in self.names for time in row.get(f"{peer}_configurations", {"all": "failed"}).values()]
        if any(isinstance(time, str) and not time.startswith("ValueError") for time in times):
            self.close()
        return row

    def close(self) -> None:
        """End the process."""
        if self._pool is not None:
            self._pool.shutdown()
        self._pool = None


def start() -> None:
    """Do what takes seconds before anything is measured."""
    jax.device_count()
    with suppress(ImportError):  # which the peers then say themselves
        import flashinfer  # noqa: F401


def share_the_device() -> None:
    """Take GPU memory as it is needed: another process holds most of it, and torch wants some as well."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
