"""One interface to run plans, for the XLA path and for every family of kernels."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Float, Int

from pallas_kernels.heads import Heads, Scores
from pallas_kernels.plan_format import ForestArrays, PlanArrays, PlanGuard


class Tiling(NamedTuple):
    """How plans for some heads cut the work on a device."""

    num_ctas: int  # thread blocks
    tile_rows: int  # query rows of a tile
    lanes: int  # row tiles that a segment may serve
    block_tokens: tuple[int, int]  # KV tokens of a block, where thread blocks have little to do and where much
    # KV tokens of a kv head, for each thread block, from which on it is much: read once, or read again by other tiles.
    much: tuple[int, int] = (0, 0)
    # Likewise of all that tiles read: from so many on two tiles share segments. What is read again may count less.
    wide: int = 0
    again: float = 1.0
    # Whether a few thread blocks may be left out, so that kv heads are read in step, also where no tiles read the same
    # by narrow segments.
    in_step: bool = True
    # Sums that a row has in a narrow segment, whose blocks go to them in turn, and lanes that a plan has at least.
    sums: int = 1

    def block_for(self, num_kv_heads: int, tokens: int, reread: int) -> int:
        """Choose the KV tokens of a block, by how many there are in all.

        Args:
          num_kv_heads: K, kv heads.
          tokens: KV tokens of a kv head that are read at all.
          reread: those that other tiles read again, each time counted.

        >>> from pallas_kernels import Tiling
        >>> tiling = Tiling(num_ctas=132, tile_rows=64, lanes=2, block_tokens=(64, 128), much=(1000, 500))
        >>> tiling.block_for(num_kv_heads=8, tokens=4096, reread=0)
        64
        >>> tiling.block_for(num_kv_heads=8, tokens=65536, reread=0)
        128
        """
        counted = zip((tokens, reread), self.much, strict=True)
        return self.block_tokens[any(n * num_kv_heads >= much * self.num_ctas for n, much in counted)]

    def pairs_pay(self, num_kv_heads: int, tokens: int, reread: int, num_ctas: int) -> bool:
        """Whether tiles read enough for two of them to share segments.

        Args:
          num_kv_heads, tokens, reread: as in `block_for`.
          num_ctas: thread blocks of the plan.

        >>> from pallas_kernels import Tiling
        >>> tiling = Tiling(num_ctas=132, tile_rows=64, lanes=2, block_tokens=(64, 128), wide=500, again=0.5)
        >>> tiling.pairs_pay(num_kv_heads=8, tokens=4096, reread=8192, num_ctas=132)
        False
        >>> tiling.pairs_pay(num_kv_heads=8, tokens=4096, reread=8320, num_ctas=132)
        True
        """
        return (tokens + self.again * reread) * num_kv_heads >= self.wide * num_ctas


class Call(NamedTuple):
    """What one call of attention reads: a pytree of the caller's arrays, of the forest's, and of the plan's."""

    query: Float[jax.Array, "B T N H"]
    key_pages: Float[jax.Array, "num_pages page_tokens K H"]
    value_pages: Float[jax.Array, "num_pages page_tokens K V"] | None  # None: the first V numbers of the keys
    query_position: Int[jax.Array, "B T"]
    forest: ForestArrays
    plan: PlanArrays
    guard: PlanGuard
    # The rows that see each token, as in `Page.readers`; None where query tokens are causal among themselves.
    readers_of_tokens: Int[jax.Array, "blocks S"] | None = None
    # The position of each token; None where it follows from its place in the node, or there is no window.
    positions_of_tokens: Int[jax.Array, "blocks S"] | None = None
    # Of latents of one byte a number: a scale for each 128, and the rotated keys, which `key_pages` do not have then.
    latent_scale: Float[jax.Array, "num_pages page_tokens 1 parts"] | None = None
    rotated_keys: Float[jax.Array, "num_pages page_tokens 1 rope"] | None = None
    # Factors on keys and values of each kv head, float32; None for 1. Pages of one byte a number have them.
    key_scale: Float[jax.Array, " K"] | None = None
    value_scale: Float[jax.Array, " K"] | None = None
    # In their place, those of each token and kv head; pages of the caller's, which may be several of the plan's.
    key_scale_of_tokens: Float[jax.Array, "num_pages K page_size"] | None = None
    value_scale_of_tokens: Float[jax.Array, "num_pages K page_size"] | None = None
    # One more logit in the softmax of each q head, float32 or of 16 bits, neither scaled nor capped; None in calls
    # whose partials are merged with others', as it counts once.
    sinks: Float[jax.Array, " N"] | None = None


class Family(NamedTuple):
    """Three answers, with the same questions for all, and a fourth that not all have.

    why_not(heads, device, scores=None, plan=None) says why it cannot serve, or None; what is None is not known yet.

    tiling(heads, device) says how plans for it are to be cut.

    attend(call, scores) runs the plan of a call: the caller's query [B, T, N, H] in; out [B, T, N, V], and the row
    maximum of the scores, scaled and capped, and the row sum of their exponentials, float32 [B, T, N], in the caller's
    order. In place of the maximum may be what the exponentials are relative to, up to 7 less. A row of no request, or
    that sees no token, has out 0, maximum -inf and sum 0, or its sink and 1. All of it is NaN where the plan does not
    hold.

    attend_and_merge(call, scores, mailbox, sizes) does so on one of several devices, each of which has some of the
    pages: it exchanges partials with the others through a mailbox of `between_devices` for merges, of these sizes, and
    returns the mailbox for the next call, and the merged rows of the heads that are this device's part.
    """

    name: str
    why_not: Callable[..., str | None]
    tiling: Callable[[Heads, jax.Device], Tiling]
    attend: Callable[[Call, Scores], tuple[jax.Array, jax.Array, jax.Array]]
    attend_and_merge: Callable[..., tuple[Any, tuple[jax.Array, jax.Array, jax.Array]]] | None = None
