"""What the experts of a mixture make of tokens, in three ways of which `map_tokens` takes the best one.

    kernel   rows in the order of their experts, each multiplied with the weights of its own: Hopper GPUs
    tiles    the same, by a loop over tiles of one expert each: elsewhere, where that is less than half of the products
    dense    every expert maps every token, and of those that are not chosen nothing is taken: elsewhere, and training

JAX has a ragged product. What XLA makes of it, on CPUs as on GPUs, masks all rows for every expert and multiplies them
all: as much as the dense way, for each of a token's experts.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.addends import Shares
from pallas_kernels.expert_rows import most_tiles, rows_of_experts, tiles_of
from pallas_kernels.gates import Activation, gated
from pallas_kernels.hopper import experts as hopper

#: Rows of a tile where a loop goes over them: enough to be worth reading an expert's weights for.
_TILE_ROWS = 64
#: Tokens that go through all experts together, so that what all make of them takes little room.
_TOKENS = 512


class Weights(NamedTuple):
    """Two projections of each expert, in the dtype of the tokens."""

    gate_up: Float[Array, "E D 2F"]
    down: Float[Array, "E F D"]
    gate_up_bias: Float[Array, "E 2F"] | None = None
    down_bias: Float[Array, "E D"] | None = None


class Chosen(NamedTuple):
    """The experts of each token."""

    expert: Int[Array, "tokens chosen"]  # E for one that is on another device
    share: Float[Array, "tokens chosen"]  # of what it makes of the token, float32


def map_tokens(
    x: Float[Array, "tokens D"], chosen: Chosen, weights: Weights, activation: Activation
) -> Float[Array, "tokens D"]:
    """Add up what its experts make of each token, in the best way there is; not to be differentiated.

    Args:
      x, chosen, weights, activation: as in `map_rows`, which warns.

    >>> from codec_jax.nnx.expert_products import Chosen, Weights, map_tokens
    >>> chosen = Chosen(jnp.asarray([[0, 1], [1, 2]]), jnp.asarray([[1.0, 0.0], [0.25, 0.75]]))
    >>> weights = Weights(jnp.ones((3, 4, 2)), jnp.ones((3, 1, 4)) * jnp.arange(3.0)[:, None, None])
    >>> map_tokens(jnp.ones((2, 4)), chosen, weights, "silu")[:, 0].round(2).tolist()
    [0.0, 27.5]
    """
    made = map_rows(x, chosen, weights, activation)
    return added_up(made, x.dtype) if isinstance(made, Shares) else made


def map_rows(
    x: Float[Array, "tokens D"], chosen: Chosen, weights: Weights, activation: Activation
) -> Float[Array, "tokens D"] | Shares:
    """Do as `map_tokens`, but leave to others to add up what was made in rows by themselves.

    Args:
      x: tokens.
      chosen: their experts.
      weights: of the experts.
      activation: of the experts.

    Warns, once, on a GPU without a kernel for these weights.
    """
    device = jax.devices()[0]
    reason = hopper.why_not(x, weights.down, device)
    if reason is None:
        made, place = hopper.map_rows(x, chosen.expert, *weights, activation=activation, num_ctas=device.core_count)
        return Shares(made, place, chosen.share)
    if device.platform == "gpu":
        # The registry of `warnings` shows a text once per process and line.
        warnings.warn(f"mixtures run without a kernel, which is correct but slow on a GPU; {reason}", stacklevel=1)
    tiles = most_tiles(chosen.expert.size, len(weights.down), _TILE_ROWS)
    by_tiles = 2 * tiles * _TILE_ROWS < len(x) * len(weights.down)
    return (_by_tiles if by_tiles else map_densely)(x, chosen, weights, activation)


def map_densely(
    x: Float[Array, "tokens D"], chosen: Chosen, weights: Weights, activation: Activation
) -> Float[Array, "tokens D"]:
    """Add up what its experts make of each token, after every expert has mapped every token; differentiable.

    Args:
      x, chosen, weights, activation: as in `map_tokens`.
    """
    run = partial(_map_all, weights, activation)
    if len(x) <= _TOKENS:
        return run((x, chosen))

    def parts(values: Array) -> Array:
        padded = jnp.pad(values, ((0, -len(x) % _TOKENS), (0, 0)))
        return padded.reshape(-1, _TOKENS, values.shape[1])

    return lax.map(run, jax.tree.map(parts, (x, chosen))).reshape(-1, x.shape[1])[: len(x)]


def _map_all(weights: Weights, activation: Activation, tokens: tuple[Array, Chosen]) -> Float[Array, "tokens D"]:
    x, chosen = tokens
    share = jnp.zeros((len(x), len(weights.down)), jnp.float32)
    share = share.at[jnp.arange(len(x))[:, None], chosen.expert].set(chosen.share, mode="drop").T[..., None]
    hidden = _product("td,edf->etf", x, weights.gate_up, weights.gate_up_bias)
    hidden = jnp.where(share > 0, _gated(activation, hidden), 0)
    out = _product("etf,efd->etd", hidden, weights.down, weights.down_bias)
    return (out.astype(jnp.float32) * share).sum(axis=0).astype(x.dtype)


def _by_tiles(x: Float[Array, "tokens D"], chosen: Chosen, weights: Weights, activation: Activation) -> Shares:
    rows = rows_of_experts(chosen.expert, len(weights.down), _TILE_ROWS)
    tiles = tiles_of(rows, _TILE_ROWS)

    def run(tile: tuple[Array, Array]) -> Float[Array, "rows D"]:
        expert, token = tile
        own = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, expert, keepdims=True), weights)
        hidden = _gated(activation, _product("td,edf->etf", x[token], own.gate_up, own.gate_up_bias))
        return _product("etf,efd->etd", hidden, own.down, own.down_bias)[0]

    made = lax.map(run, (tiles.expert, rows.token.reshape(-1, _TILE_ROWS)))
    return Shares(made.reshape(-1, x.shape[1]), rows.place, chosen.share)


def added_up(shares: Shares, dtype: jnp.dtype) -> Float[Array, "tokens D"]:
    """Add up what was made of a token's rows, by the shares of the experts; nothing of what is on other devices."""
    of_token = shares.made.at[shares.place].get(mode="fill", fill_value=0)  # [tokens, chosen, D]
    return (of_token.astype(jnp.float32) * shares.share[..., None]).sum(axis=1).astype(dtype)


def _product(indices: str, x: Array, weights: Array, bias: Array | None) -> Float[Array, "E t outputs"]:
    """Multiply with the weights of each expert."""
    out = jnp.einsum(indices, x, weights)
    return out if bias is None else out + bias[:, None]


def _gated(activation: Activation, gate_up: Float[Array, "*batch 2F"]) -> Float[Array, "*batch F"]:
    return gated(activation, *jnp.split(gate_up, 2, axis=-1))
