"""Shared tokens and where they lie: the forest, its edits, the pages of its nodes, and draft trees above its leaves."""

from codec_jax.forest.draft_trees import DraftTrees
from codec_jax.forest.forest import Forest
from codec_jax.forest.kv_pages import ONE_BYTE, KVPages, Quantisation, finite
from codec_jax.forest.latent_pages import LatentPages, LatentQuantisation, Pages
from codec_jax.forest.page_copies import PageCopies
from codec_jax.forest.page_subset import PageSubset
from codec_jax.forest.pages import PagePool
from codec_jax.forest.prefix_cache import PrefixCache
from codec_jax.forest.token_slots import NO_SLOT
from codec_jax.forest.token_tree import Match
from codec_jax.forest.tree import FREE, NO_NODE, ROOT, Tree
from codec_jax.forest.window_pages import WindowPages

__all__ = [
    "FREE",
    "NO_NODE",
    "NO_SLOT",
    "ONE_BYTE",
    "ROOT",
    "DraftTrees",
    "Forest",
    "KVPages",
    "LatentPages",
    "LatentQuantisation",
    "Match",
    "PageCopies",
    "PagePool",
    "PageSubset",
    "Pages",
    "PrefixCache",
    "Quantisation",
    "Tree",
    "WindowPages",
    "finite",
]
