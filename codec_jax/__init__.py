"""Prefix-shared attention for LLM decoding: forest -> plan -> PAC -> POR -> output.

Axes are named by letters after `jax.nn.dot_product_attention`, in every signature and comment:

    B  request slots of a forest, free ones included, in the caller's order
    T  query tokens per request: 1 in decoding, more in verification and prefill
    S  KV tokens
    N  q heads
    K  kv heads; N is a multiple of K, and each kv head serves G = N / K q heads
    H  head size; V where that of the values may differ
    R  rows of a tile: consecutive (request, query token, q head of the kv head) triples, depth first

and by words: `nodes` and `pages` of a forest, `num_pages` and `page_size` of a pool, `tiles`, `streams`, `blocks` and
`segments` of a plan (see `codec_jax.planning.plan`). A slot is a place for one token in the pages; a request slot is a
place for a request in a forest.
"""

import importlib
from typing import TYPE_CHECKING

from codec_jax import attention, flash_decoding, latent
from codec_jax import partial as partial
from codec_jax.errors import LogitsError, OutOfPagesError, OutOfSlotsError, PlanError
from codec_jax.forest import DraftTrees, Forest, KVPages, LatentPages, PagePool, PageSubset, PrefixCache
from codec_jax.planning import CostModel, Plan, make_plan, replan
from codec_jax.show import show
from pallas_kernels import Window

__version__ = "0.1.0"

# Not `partial`, which would take the place of functools' in the caller's names.
__all__ = [
    "CostModel",
    "DraftTrees",
    "Forest",
    "KVPages",
    "LatentPages",
    "LogitsError",
    "OutOfPagesError",
    "OutOfSlotsError",
    "PagePool",
    "PageSubset",
    "Plan",
    "PlanError",
    "PrefixCache",
    "Window",
    "__version__",
    "attention",
    "flash_decoding",
    "latent",
    "make_plan",
    "replan",
    "show",
]

if not TYPE_CHECKING:  # to a type checker, a module that makes its names up has every name

    def __getattr__(name):
        """Import `codec_jax.nnx` when it is asked for: flax takes a while, and attention does without it."""
        if name == "nnx":
            return importlib.import_module("codec_jax.nnx")
        raise AttributeError(f"module 'codec_jax' has no attribute {name!r}")
