"""A user's file, for `mypy --strict`: every value of the library has the type that its documentation names.

It is not run. `.ci/run` checks it against the installed wheel.
"""

from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np

from codec_jax import (
    CostModel,
    DraftTrees,
    Forest,
    KVPages,
    PagePool,
    Plan,
    __version__,
    attention,
    flash_decoding,
    latent,
    make_plan,
    partial,
    replan,
)
from codec_jax.attention import forest_attention
from codec_jax.nnx import Completion, Decoder, DecoderConfig, Sampler, open_checkpoint
from codec_jax.planning.predict import call_us, loads

assert_type(__version__, str)

forest = Forest.from_sequences([[1, 2, 3], [1, 2, 4]])
assert_type(forest, Forest)
assert_type(Forest.from_nodes([-1], [3], [0]), Forest)
assert_type(Forest.from_block_table(np.zeros((1, 1), np.int32), np.ones(1, np.int32), 16), Forest)
assert_type(forest.reserve(PagePool.create(8, forest.used_pages), 4), tuple[Forest, PagePool])
assert_type(forest.retire(PagePool.create(8, forest.used_pages), [0]), tuple[Forest, PagePool])
assert_type(forest.extend(), Forest)
assert_type(forest.request_capacity, int)
assert_type(forest.svg(), str)

plan = make_plan(forest, num_q_heads=8, num_kv_heads=2, head_dim=64, cost_model=CostModel.load("costs.json"))
assert_type(plan, Plan)
assert_type(replan(plan, forest, steps=4), Plan)
assert_type(call_us(plan), float)
print(loads(plan).max())

pages = KVPages.zeros(8, 16, 2, 64, jnp.bfloat16)
query = jnp.zeros((2, 1, 8, 64), jnp.bfloat16)
assert_type(pages.write(forest.slots(), query[:, :, :2], query[:, :, :2]), KVPages)
assert_type(forest_attention(query, pages.key, pages.value, forest, plan), jax.Array)
out, (row_max, row_sum) = attention.forest_attention(
    query, pages.key, pages.value, forest, plan, drafts=DraftTrees.from_parents([[-1], [-1]]), return_residuals=True
)
assert_type(out, jax.Array)
assert_type(row_max, jax.Array)
assert_type(row_sum, jax.Array)
assert_type(
    partial.por(partial.Partial(out, row_max, row_sum), partial.Partial(out, row_max, row_sum)), partial.Partial
)
assert_type(
    latent.latent_attention(query, query, pages.key, query[0, 0], query[0, 0], forest, plan, scale=0.1), jax.Array
)
assert_type(flash_decoding.flash_attn_with_kvcache(query, pages.key, pages.value, cache_seqlens=16), jax.Array)
assert_type(
    flash_decoding.flash_attn_with_kvcache(query, pages.key, pages.value, cache_seqlens=16, return_softmax_lse=True),
    tuple[jax.Array, jax.Array],
)

checkpoint = open_checkpoint("Qwen3-4B")
assert_type(checkpoint.config, DecoderConfig)
model = checkpoint.load()
assert_type(model, Decoder)
sampler = Sampler(model, max_requests=8, num_pages=64)
assert_type(sampler.generate([[1, 2, 3]], max_new_tokens=4), list[Completion])
