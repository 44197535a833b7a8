"""Two forms of latent attention, and which of them a node is worth: its latents, or K and V of every head.

    form            read for each token            products for each row and q head
    absorbed        L + rope numbers               2 (2 L + rope)
    reconstructed   N (nope + rope + V) numbers    2 (nope + rope + V)

With few readers reading decides, and latents are small; with many readers products do, and K and V need fewer of them.
What reconstruction itself takes is not counted: it is done once, for many steps. TyphoonMLA (Yüzügüler et al., arXiv
2509.21081) has both forms for one prefix; here each node has the one that suits it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from codec_jax import checks
from codec_jax.forest import Forest, PageCopies, PageSubset
from codec_jax.forest.tree import GONE
from codec_jax.planning.plan import growing_leaves
from codec_jax.planning.published_rates import Rates, published_rates
from pallas_kernels.packing import TILE_ROWS

#: Of an H200, for devices whose rates are not published.
_RATES = Rates(4.5e6, 650e6)
#: What it takes a call on a GPU to attend to K and V beside latents: two more kernels, and partials of both to merge.
_BESIDE_US = 20.0


def choose_reconstructed(
    forest: Forest,
    *,
    num_q_heads: int,
    latent: int,
    rope: int,
    nope: int,
    value: int,
    num_pages: int,
    capacity: int,
    query_tokens: int = 1,
    itemsize: int = 2,
) -> PageSubset:
    """Choose the pages whose K and V are worth having: of nodes with many readers, those that save the most first.

    A node is chosen whole, and none that grows; none at all if together they do not save what it costs a call on a GPU
    to have two forms. Rates are those published for the default device.

    Args:
      forest: a forest with NumPy arrays.
      num_q_heads: N, of one device.
      latent: L, numbers of a latent.
      rope: numbers of the rotated key.
      nope: numbers of the part of a head's key that has no position.
      value: V, numbers of a head's value.
      num_pages: pages of the pool.
      capacity: pages that there is memory for: N (nope + rope + V) numbers for each of their tokens, and layer.
      query_tokens: T, query tokens per request.
      itemsize: bytes of a number, of latents and of K and V.

    Returns the subset: `make_plan` takes it, and its `rest`. Raises ValueError for a pool that has fewer pages than the
    forest, TypeError for a forest that lives on a device.

    >>> from codec_jax.latent import choose_reconstructed
    >>> sizes = {"num_q_heads": 128, "latent": 512, "rope": 64, "nope": 128, "value": 128}
    >>> forest = Forest.from_nodes([-1] + [0] * 256, [4096] + [16] * 256, list(range(1, 257)))
    >>> chosen = choose_reconstructed(forest, **sizes, num_pages=1024, capacity=512)
    >>> int((chosen.place >= 0).sum())
    256

    Source: DeepSeek-V2, section 2.1 (arXiv 2405.04434), for both forms.
    """
    checks.instance("forest", forest, Forest)
    if not forest.is_host:
        raise TypeError("forest: expected NumPy arrays, got arrays on a device; choose with the host's forest")
    sizes = {"num_q_heads": num_q_heads, "latent": latent, "nope": nope, "value": value, "query_tokens": query_tokens}
    sizes["itemsize"] = itemsize
    for name, size in sizes.items():
        checks.integer(name, size)
    checks.integer("rope", rope, 0)
    if (last := int(forest.used_pages.max(initial=-1))) >= checks.integer("num_pages", num_pages):
        raise ValueError(f"num_pages: expected at least {last + 1}, which the forest refers to, got {num_pages}")
    copies = PageCopies.none(num_pages, checks.integer("capacity", capacity))
    forms = Forms(num_q_heads, latent, rope, nope, value, itemsize, query_tokens)
    worth = forms.worth_reconstructing(forest)
    chosen = copies.follow([node.pages for node in worth]).subset
    return chosen if pay_together([node for node in worth if node.is_in(chosen)]) else copies.follow([]).subset


class Worth(NamedTuple):
    """A node whose K and V are worth having."""

    pages: Int[np.ndarray, " pages"]
    saved_us: float  # of a call

    def is_in(self, subset: PageSubset) -> bool:
        """Whether there was room for all of it."""
        return bool((subset.place[self.pages] >= 0).all())


def pay_together(nodes: Sequence[Worth]) -> bool:
    """Say whether some nodes together save what it costs a call to have two forms."""
    beside = _BESIDE_US if jax.devices()[0].platform == "gpu" else 0.0
    return sum(node.saved_us for node in nodes) > beside


class Forms(NamedTuple):
    """Sizes of latent attention, by which its two forms are told apart."""

    num_q_heads: int  # N, of one device
    latent: int  # L
    rope: int
    nope: int
    value: int  # V
    itemsize: int = 2  # bytes of a number, of latents and of K and V
    query_tokens: int = 1  # T

    def worth_reconstructing(self, forest: Forest) -> list[Worth]:
        """Return the nodes whose K and V are worth having, the one that saves the most of a token first.

        None of them grows, and together they pay.
        """
        saved = self.saved_us(forest.readers)
        saved[growing_leaves(forest)] = 0.0
        order = np.argsort(-saved, kind="stable")

        def worth(node: int) -> Worth:
            pages = forest.pages_of(node)
            return Worth(pages[pages != GONE], float(saved[node] * forest.length[node]))

        nodes = [worth(node) for node in order[saved[order] > 0].tolist()]
        return nodes if pay_together(nodes) else []

    def saved_us(self, readers: Int[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Return what K and V save of the time that a token's latent takes, with so many readers."""
        rows, head = readers.astype(np.int64) * self.query_tokens, self.nope + self.rope + self.value
        absorbed = self._token_us(rows * self.num_q_heads, 1, self.latent + self.rope, 2 * self.latent + self.rope)
        return absorbed - self._token_us(rows, self.num_q_heads, self.num_q_heads * head, head)

    def _token_us(
        self, rows: Int[np.ndarray, " n"], kv_heads: int, numbers: int, products: int
    ) -> Float[np.ndarray, " n"]:
        """Return how long a token takes: to be read once, or to be multiplied with whole tiles of rows."""
        rates = published_rates(jax.devices()[0].device_kind) or _RATES
        reading = numbers * self.itemsize / rates.bytes_per_us
        multiplying = 2.0 * products * kv_heads * -(-rows // TILE_ROWS) * TILE_ROWS / rates.flops_per_us
        return np.where(rows > 0, np.maximum(reading, multiplying), 0.0)
