"""How a decoder is divided among the devices of a mesh, and all that they tell each other while it decodes.

Device (c, t) of the axes "context" and "tensor" has the number b = t C + c among S = T C. Every product with weights is
divided among all S, but for that of queries, keys and values where its weights are so few that all C devices of a group
compute what a gather would bring. Attention is divided among T groups by heads, and among the C devices of a group by
pages.

    x ─► columns b ─► gather ─► K, V to the pages ─► attend,  merge ─► rows b ─► reduce ─► + x
                      all that  that live here       to those  heads b    and norm
                      group t                        pages
                      has

Where each computes whole heads, and one kernel does all up to the pages (`head_split`), the gather is in it: whoever
computed a head norms and rotates it, and sends what all store.

Of latent attention every device computes the latents, and of the queries columns b. Of a mixture every device has some
of the experts, and the shares of all tokens. Tokens are drawn by rows: device b has the whole vocabulary for some
requests, and tells the others what it drew.

    hidden ─► logits of columns b ─► deal ─► logits of rows b ─► draw ─► pool
                                     to those                    tokens  of all
                                     rows                        of own  rows

Everything here runs inside of `jax.shard_map`, under its checks. What is the same on all devices stays so: `reduce`,
`embed`, `join` and `pool` end with it. On one device every method returns what it is given, and the program has nothing
of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from codec_jax.attention.exchange import merge_heads
from codec_jax.forest import Pages
from codec_jax.mesh import CONTEXT, TENSOR, axis_size, check_mesh
from codec_jax.nnx.decoder_config import DecoderConfig
from codec_jax.nnx.head_sizes import takes_heads
from codec_jax.nnx.mailboxes import Mailbox, stride_of
from pallas_kernels import Call, Family, Scores
from pallas_kernels.varying import vary_like


@dataclass(frozen=True)
class Parallel:
    """Devices along each axis of a mesh; an axis of one device is as good as none."""

    tensor: int = 1  # T
    context: int = 1  # C
    #: From one device of a group to the next, in the order of all, if devices exchange through mailboxes.
    stride: int | None = field(default=None, compare=False)
    sums: Mailbox | None = field(default=None, compare=False)  # of hidden states, from `embed` on
    gathers: Mailbox | None = field(default=None, compare=False)  # of columns, or of heads
    merges: tuple[Mailbox, ...] = field(default=(), compare=False)  # of attention, by the batch
    differentiable: bool = False  # what is computed: by XLA alone then, as kernels have no derivatives

    @classmethod
    def of(cls, mesh: Mesh | None) -> Parallel:
        """Return the sizes of a mesh. Raises ValueError for other axes, TypeError for what is no mesh."""
        check_mesh(mesh, CONTEXT, TENSOR)
        stride = None if mesh is None else stride_of(mesh)
        return cls(axis_size(mesh, TENSOR), axis_size(mesh, CONTEXT), stride)

    @property
    def devices(self) -> int:
        """Return how many devices there are (S)."""
        return self.tensor * self.context

    @property
    def has_kernels(self) -> bool:
        """Whether kernels compute a device's part: not for derivatives, nor where XLA divides arrays among several."""
        here = jax.sharding.get_abstract_mesh()
        return not self.differentiable and set(here.axis_names) == set(here.manual_axes)

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the axes of several devices, in the order that numbers these."""
        return (TENSOR,) * (self.tensor > 1) + (CONTEXT,) * (self.context > 1)

    def heads(self, num_q_heads: int, num_kv_heads: int) -> tuple[int, int]:
        """Return the q heads and the kv heads that a device attends with; several may have the same kv head."""
        return num_q_heads // self.tensor, max(num_kv_heads // self.tensor, 1)

    def columns(self, config: DecoderConfig) -> tuple[int, int, int]:
        """Return the columns of the queries, the keys and the values that a device attends with."""
        num_q_heads, num_kv_heads = self.heads(config.num_q_heads, config.num_kv_heads)
        return num_q_heads * config.head_dim, num_kv_heads * config.head_dim, num_kv_heads * config.head_dim

    @property
    def collects_heads(self) -> bool:
        """Whether the devices of a group exchange heads while these are split (`head_split`), and gather no columns."""
        return self.gathers is not None and self.gathers.is_by_rows

    def gather(self, columns: Float[Array, "B T columns"], sizes: Sequence[int]) -> Float[Array, "B T all"]:
        """Join what the devices of a group computed of each part of a product; the parts then have these sizes.

        Where each computed all columns (`repeated_bytes`), nothing is to be joined.
        """
        if columns.shape[2] == sum(sizes):
            return columns
        own = [size // self.context for size in sizes]
        if self.gathers is not None and self.gathers.takes(columns):
            joined = self.gathers.collect(columns, own)
            return vary_like(joined, lax.axis_index(TENSOR)) if self.tensor > 1 else joined
        blocks = lax.all_gather(columns, CONTEXT, axis=2, to="invarying")
        parts = jnp.split(blocks, np.cumsum(own)[:-1].tolist(), axis=-1)
        return jnp.concatenate([part.reshape(*columns.shape[:2], -1) for part in parts], axis=-1)

    def reduce(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Add up the parts that all devices have of a sum."""
        if self.sums is not None and self.sums.takes(x):
            return self.sums.add_up(x)
        return lax.psum(x, self.axes) if self.axes else x

    def once(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Return what the first device adds to a sum of all, and zeros on the others."""
        return jnp.where(lax.axis_index(self.axes) == 0, x, jnp.zeros_like(x)) if self.axes else x

    def here(self, number: Int[Array, "*shape"], count: int) -> Int[Array, "*shape"]:
        """Number things, a run of which is here, from the first one; those of other devices are out of bounds."""
        if not self.axes:
            return number
        own = count // self.devices
        local = number - lax.axis_index(self.axes) * own
        return jnp.where((local >= 0) & (local < own), local, own)

    def embed(
        self,
        lookup: Callable[[Array], Array],
        tokens: Int[Array, "B T"],
        config: DecoderConfig,
        batches: Sequence[tuple[int, ...]],
    ) -> tuple[Float[Array, "B T D"], Parallel]:
        """Look tokens up where their rows of the embedding are; return what to go on with, too.

        Devices whose kernels may write to each other's memory meet there: from then on they do. The tokens are those of
        several batches, perhaps, of these shapes.
        """
        if not self.axes:
            return lookup(tokens), self
        token = self.here(tokens, config.vocab_size)
        is_here = token < config.vocab_size // self.devices
        x = jnp.where(is_here[..., None], lookup(jnp.where(is_here, token, 0)), 0)
        opened = self._with_mailboxes(jnp.ravel(tokens)[0].astype(jnp.int32), x, config, batches)
        for mailbox in (opened.sums, opened.gathers, *opened.merges):
            if mailbox is not None:  # so that a device that has this sum knows that all have theirs
                x += mailbox.opened.astype(x.dtype)
        return self.reduce(x), opened

    def _with_mailboxes(
        self, token: Int[Array, ""], x: Float[Array, "B T D"], config: DecoderConfig, batches: Sequence[tuple[int, ...]]
    ) -> Parallel:
        """Make those that the layers of a step need; they depend on one of its tokens, and on different numbers."""
        if self.stride is None:
            return self
        group, gathers, merges = (self.context, self.stride), None, []
        if self.context > 1 and config.latent is None:
            num_q_heads, num_kv_heads = self.heads(config.num_q_heads, config.num_kv_heads)
            if not repeated_bytes(config, self):
                gathers = self._with_gathers(token + 1, x, config, *group)
            for number, shape in enumerate(dict.fromkeys(batches)):
                query = jax.ShapeDtypeStruct((*shape, num_q_heads, config.head_dim), x.dtype)
                merges.append(Mailbox.for_merges(token + 2 + number, query, num_kv_heads, *group))
        sums = Mailbox.for_rows(token, x, self.devices) or Mailbox.for_arrays(token, x, self.devices)
        return replace(self, sums=sums, gathers=gathers, merges=tuple(filter(None, merges)))

    def _with_gathers(
        self, seed: Int[Array, ""], x: Float[Array, "B T D"], config: DecoderConfig, *group: int
    ) -> Mailbox | None:
        """Make one for heads where each device computes whole ones, and a kernel splits them; else for columns."""
        own, rows = [size // self.context for size in self.columns(config)], x.shape[:2]
        heads_here = self.heads(config.num_q_heads, config.num_kv_heads)
        is_served = self.has_kernels and takes_heads(config, heads_here, math.prod(rows))
        if heads_here[1] % self.context == 0 and is_served:
            heads = jax.ShapeDtypeStruct((*rows, sum(own) // config.head_dim, config.head_dim), x.dtype)
            if (of_heads := Mailbox.for_heads(seed, heads, *group)) is not None:
                return of_heads
        return Mailbox.for_columns(seed, jax.ShapeDtypeStruct((*rows, sum(own)), x.dtype), own, *group)

    def join(self, logits: Float[Array, "*part"], axis: int = -1) -> Float[Array, "*whole"]:
        """Return the logits of which each device has a run along an axis: of the vocabulary, or of the rows."""
        if not self.axes:
            return logits
        return lax.all_gather(logits, self.axes, axis=axis % logits.ndim, tiled=True, to="invarying")

    def own_rows(self, count: int) -> Int[Array, " b"] | None:
        """Return which of `count` rows this device draws tokens for, None for all; the last one may come again."""
        if not self.axes:
            return None
        each = self._rows(count)
        return jnp.minimum(self._first_row(count) + jnp.arange(each), count - 1)

    def own(self, tree: Any) -> Any:
        """Return the rows that this device draws tokens for, of arrays that all have."""
        return jax.tree.map(lambda x: jnp.asarray(x)[self.own_rows(len(x))], tree) if self.axes else tree

    def deal(self, multiply: Callable[[Array], Array], hidden: Float[Array, "B D"]) -> Float[Array, "b V"]:
        """Return the logits of the whole vocabulary for the rows that `own` has."""
        if not self.axes:
            return multiply(hidden)
        missing = self._rows(len(hidden)) * self.devices - len(hidden)
        columns = multiply(jnp.pad(hidden, ((0, missing), (0, 0))))
        return lax.all_to_all(columns, self.axes, split_axis=0, concat_axis=1, tiled=True)

    def pool(self, tree: Any, count: int) -> Any:
        """Return all `count` rows, of which each device has its own; integers are exact up to 2**24."""
        if not self.axes:
            return tree
        leaves, structure = jax.tree.flatten(tree)
        rows = self._rows(count)
        packed = jnp.concatenate([x.reshape(rows, -1).astype(jnp.float32) for x in leaves], axis=1)
        empty = jnp.zeros((rows * self.devices, packed.shape[1]), jnp.float32)
        # A sum of rows and zeros: XLA has a kernel of its own for it, which takes half as long as a gather.
        everyone = self.reduce(lax.dynamic_update_slice_in_dim(empty, packed, self._first_row(count), axis=0))[:count]
        parts = jnp.split(everyone, np.cumsum([math.prod(x.shape[1:]) for x in leaves])[:-1].tolist(), axis=1)
        pooled = [part.reshape(count, *x.shape[1:]).astype(x.dtype) for part, x in zip(parts, leaves, strict=True)]
        return jax.tree.unflatten(structure, pooled)

    def _rows(self, count: int) -> int:
        return -(-count // self.devices)

    def _first_row(self, count: int) -> Int[Array, ""]:
        return lax.axis_index(self.axes) * self._rows(count)

    def local_slots(self, slots: Int[Array, "B T"], pages: Pages) -> Int[Array, "B T"]:
        """Number token slots from the first page that lives here; those of other devices are out of bounds."""
        if self.context == 1:
            return slots
        # Negative ones are dropped like those past the end, and so is NO_SLOT, which no pool is large enough to reach.
        return slots - lax.axis_index(CONTEXT) * math.prod(pages.key.shape[:2])

    def merge(
        self, out: Float[Array, "B T N H"], row_max: Float[Array, "B T N"], row_sum: Float[Array, "B T N"]
    ) -> tuple[Float[Array, "B T n H"], Float[Array, "B T n"], Float[Array, "B T n"]]:
        """Merge attention over the pages of each device of a group; each gets its part of the group's heads."""
        return (out, row_max, row_sum) if self.context == 1 else merge_heads(out, row_max, row_sum, CONTEXT)

    def attend(self, family: Family, call: Call, scores: Scores) -> tuple[Array, Array, Array]:
        """Run a call over the pages of all devices of a group; each gets its part of the group's heads."""
        mailbox = next((mailbox for mailbox in self.merges if mailbox.takes(call.query)), None)
        if mailbox is not None and family.attend_and_merge is not None:
            return mailbox.attend(family, call, scores)
        return self.merge(*family.attend(call, scores))


#: One device, which has everything.
ALONE = Parallel()

#: Reading so many bytes of weights takes less time than a small gather, and what waits for it: by XLA, and by a kernel.
_BYTES_OF_A_GATHER, _BYTES_OF_A_KERNEL = 64 << 20, 32 << 20


def repeated_bytes(config: DecoderConfig, parallel: Parallel) -> int:
    """Return the bytes of a layer's weights that a device has beyond its part, 0 if it has no others.

    Where they are few all devices of a group compute all its queries, keys and values, rather than gather columns.
    """
    size = config.hidden_size * sum(parallel.columns(config)) * jnp.dtype(config.param_dtype).itemsize
    more = size - size // parallel.context
    most = _BYTES_OF_A_GATHER if parallel.stride is None else _BYTES_OF_A_KERNEL
    return more if config.latent is None and more <= most else 0
