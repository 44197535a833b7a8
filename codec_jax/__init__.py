"""Prefix-shared attention for LLM decoding: forest -> plan -> PAC -> POR -> output.

Axes are named by letters after `jax.nn.dot_product_attention`, in every signature and comment:

    B  request slots of a forest, free ones included, in the caller's order
    T  query tokens per request: 1 in decoding, more in verification and prefill
    S  KV tokens
    N  q heads
    K  kv heads; N is a multiple of K, and each kv head serves G = N / K q heads
    H  head size
    R  rows of a tile: consecutive (request, query token, q head of the kv head) triples, depth first

and by words: `nodes` and `entries` of a forest, `num_pages` and `page_size` of a pool, `tiles`, `streams`, `blocks`,
`slots` and `segments` of a plan (see `codec_jax.plan`).
"""

from codec_jax import attention, flash_decoding, latent, partial
from codec_jax.cost import CostModel
from codec_jax.drafts import DraftTrees
from codec_jax.errors import LogitsError, OutOfPagesError, OutOfSlotsError, PlanError
from codec_jax.forest import Forest
from codec_jax.pages import KVPages, PagePool
from codec_jax.plan import Plan, make_plan
from codec_jax.show import show

__all__ = [
    "CostModel",
    "DraftTrees",
    "Forest",
    "KVPages",
    "LogitsError",
    "OutOfPagesError",
    "OutOfSlotsError",
    "PagePool",
    "Plan",
    "PlanError",
    "attention",
    "flash_decoding",
    "latent",
    "make_plan",
    "partial",
    "show",
]
