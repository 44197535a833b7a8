"""How many KV pages fit into the memory of the device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from codec_jax import checks
from codec_jax.nnx.decoder_config import DecoderConfig
from codec_jax.nnx.kept import SHARE, pays
from codec_jax.nnx.parallel import Parallel, repeated_bytes
from codec_jax.nnx.prefill import MAX_CHUNK_TOKENS
from codec_jax.nnx.scheduler import PREFILL_TOKENS, STEPS

#: Of the memory that is free, what KV pages may take; the rest is for activations.
KV_SHARE = 0.8
#: What says which share of a GPU's memory JAX takes, and the share that a command takes, which has the GPU to itself.
_SHARE_OF_GPU, _MOST = "XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9"
#: KV pages where the device does not say how much memory it has.
DEFAULT_KV_GIB = 4.0
#: What commands call dtypes of the KV cache alone, and what a `DecoderConfig` calls them.
KV_DTYPES: dict[str, dict[str, Any]] = {
    "fp8": {"kv_dtype": jnp.float8_e4m3fn},
    "fp8-by-token": {"kv_dtype": jnp.float8_e4m3fn, "kv_scales": "token"},
}
#: What commands say of their options, by the rules of `argparse`.
KV_DTYPE_HELP = (
    "of the KV cache: fp8 takes one byte a number, fp8-by-token and a scale of each token and kv head "
    "(default: as --dtype)"
)
KV_CACHE_HELP = (
    f"memory for KV pages (default: {KV_SHARE:.0%}% of what the weights leave free on the device, "
    f"{DEFAULT_KV_GIB:g} where it does not say)"
)


def take_most_of_the_gpu() -> None:
    """Let JAX take 90% of a GPU's memory in place of 75%, unless the environment says how much.

    To be called before JAX looks for devices.
    """
    os.environ.setdefault(_SHARE_OF_GPU, _MOST)


def pages_of_windows(
    config: DecoderConfig,
    parallel: Parallel,
    page_size: int,
    *,
    max_requests: int,
    prefill_tokens: int = PREFILL_TOKENS,
    steps: int = STEPS,
    given: int | None = None,
) -> int:
    """Return the pages that an engine's layers with windows are to have, 0 for as many as the others.

    Args:
      config: of the decoder.
      parallel: devices that divide it.
      page_size: tokens in a page.
      max_requests, prefill_tokens, steps: as in `Engine`.
      given: pages that are asked for. Defaults to what twice as many requests can see, where some layers see
        everything and others do not: half of it is left for prefixes that nobody reads.

    Raises ValueError for less than a single request may need, or pages of a model that cannot have them.

    >>> from codec_jax import Window
    >>> from codec_jax.nnx.memory import pages_of_windows
    >>> from codec_jax.nnx.parallel import ALONE
    >>> config = DecoderConfig(64, 32, 64, 4, 4, 2, 16, windows=(Window(512), None))
    >>> pages_of_windows(config, ALONE, 16, max_requests=64)
    5120
    """
    windows = [window.tokens for window in config.windows_used if window is not None]
    if not windows or config.windows_used[0] is not None or config.latent is not None or parallel.context > 1:
        if given:
            raise ValueError(
                "windowed_pages: expected 0 or None for a model without layers of both kinds, with latent attention, "
                f'or on several devices along "context", got {given}'
            )
        return 0
    # A window begins and ends inside of pages, and a request may just have got a node of its own to grow in. Chunks end
    # where nodes do, inside of pages.
    of_request = -(-max(windows) // page_size) + 4 + 2 * -(-steps // page_size)
    of_chunks = 2 * -(-max(prefill_tokens, 2 * page_size, MAX_CHUNK_TOKENS) // page_size)
    if given is None:
        return 2 * max_requests * of_request + of_chunks
    if 0 < checks.integer("windowed_pages", given, 0) < (least := of_request + of_chunks):
        raise ValueError(
            f"windowed_pages: expected at least {least}, what a request and the chunks of a step may see, got {given}; "
            "compute fewer prefill_tokens in a step, or make it larger"
        )
    return given


def pages_of_replicas(
    config: DecoderConfig,
    groups: Sequence[Mesh | None],
    page_size: int,
    *,
    max_requests: int,
    prefill_tokens: int = PREFILL_TOKENS,
    invariant: bool = False,
    gib: float | None = None,
    weights_to_come: int = 0,
) -> int:
    """Return the KV pages that every replica of a model has memory for.

    Args:
      config, page_size, gib, weights_to_come: as in `pages_that_fit`.
      groups: the mesh of each replica; None for one on one device.
      max_requests, prefill_tokens, invariant: as in `Engine`.

    >>> from codec_jax.nnx.memory import pages_of_replicas
    >>> config = DecoderConfig(64, 32, 64, num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=16)
    >>> pages_of_replicas(config, [None], 16, max_requests=64, gib=1.0)
    524288
    """
    options: dict[str, Any] = {"gib": gib, "weights_to_come": weights_to_come}
    if not invariant:
        sizes = {"max_requests": max_requests, "prefill_tokens": prefill_tokens}
        windowed = pages_of_windows(config, Parallel.of(groups[0]), page_size, **sizes)
        options |= {"max_requests": max_requests, "windowed_pages": windowed}
    return min(pages_that_fit(config, page_size, mesh=mesh, **options) for mesh in groups)


def pages_that_fit(
    config: DecoderConfig,
    page_size: int,
    *,
    gib: float | None = None,
    weights_to_come: int = 0,
    mesh: Mesh | None = None,
    max_requests: int = 1,
    windowed_pages: int = 0,
    reconstructed_pages: int = 0,
) -> int:
    """Return the KV pages of all layers that there is memory for.

    Args:
      config: sizes of the decoder.
      page_size: tokens in a page.
      gib: memory for KV pages; defaults to 80% of what is free on the device, 4 where it does not say.
      weights_to_come: bytes of weights that are not there yet, of the whole model.
      mesh: devices that divide weights and pages; `gib` is then of each, and the one with the least memory counts.
      max_requests: that decode at a time. Where so many make it worth keeping K and V beside latents, there is to be
        memory for these, too.
      windowed_pages: of each layer with a window, by `pages_of_windows`, where they are to have fewer than the others.
      reconstructed_pages: of K and V beside latents, so many of which are to have memory, too.

    Raises ValueError for a mesh of several processes without `gib`: they may not have the same memory left.

    >>> config = DecoderConfig(64, 32, 64, num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=16)
    >>> from codec_jax.nnx.memory import pages_that_fit
    >>> pages_that_fit(config, 16, gib=1.0)
    524288
    """
    parallel = Parallel.of(mesh)
    if gib is None:
        if mesh is not None and mesh.is_multi_process:
            raise ValueError("num_pages: expected a number for a mesh of several processes, got None; choose one")
        devices = jax.devices()[:1] if mesh is None else mesh.local_devices
        memory = [stats for device in devices if (stats := device.memory_stats()) is not None]
        free = min((stats["bytes_limit"] - stats["bytes_in_use"] for stats in memory), default=None)
        repeated = config.num_layers * repeated_bytes(config, parallel) if weights_to_come else 0
        to_come = weights_to_come / parallel.devices + repeated
        gib = DEFAULT_KV_GIB if free is None else KV_SHARE * (free - to_come) / 2**30
    _, num_kv_heads = parallel.heads(config.num_q_heads, config.num_kv_heads)
    page = page_size * config.kv_token_bytes * num_kv_heads // config.num_kv_heads
    if pays(config, parallel, max_requests):
        page = int(page * (1 + SHARE))
    room = gib * 2**30
    if reconstructed_pages:
        room -= reconstructed_pages * page_size * (config.reconstructed_token_bytes // parallel.tensor)
    pages = max(0, int(room // page))
    if windowed_pages and pages > windowed_pages:
        in_windows = page * config.windowed_layers // config.num_layers
        pages = int((room - windowed_pages * in_windows) // (page - in_windows))
    return pages * parallel.context
