"""The part of a block that maps each token by itself: an MLP, or a mixture of experts."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from codec_jax.nnx.decoder_config import Activation, DecoderConfig, Mixture
from codec_jax.nnx.parallel import ALONE, Parallel

#: Of gpt-oss: the sigmoid's slope, and the bound of gate and up.
_SLOPE, _LIMIT = 1.702, 7.0
#: Tokens that go through experts together, so that what all experts make of them takes little room.
_TOKENS = 512
#: Added to sums that are divided by: of sigmoids, all of a token's may be 0.
_TINY = 1e-20


def linear(config: DecoderConfig, inputs: int, outputs: int, rngs: nnx.Rngs, *, bias: bool = False) -> nnx.Linear:
    """Return a product with weights in the dtypes of the config."""
    return nnx.Linear(inputs, outputs, use_bias=bias, dtype=config.dtype, param_dtype=config.param_dtype, rngs=rngs)


class MLP(nnx.Module):
    """A gated MLP, such as SwiGLU."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, size: int | None = None) -> None:
        """Create the two projections, of another size than the config's if one is given."""
        self.activation, size = config.activation, config.mlp_size if size is None else size
        self.gate_up = linear(config, config.hidden_size, 2 * size, rngs)
        self.down = linear(config, size, config.hidden_size, rngs)

    def __call__(self, x: Float[Array, "B T D"], parallel: Parallel = ALONE) -> Float[Array, "B T D"]:
        """Map each token by itself; inside of `jax.shard_map`, by the devices among which the columns are divided."""
        return parallel.reduce(self.down(_gated(self.activation, self.gate_up(x))))


class Experts(nnx.Module):
    """A router, and gated MLPs of which each token goes through a few, and perhaps one that all go through."""

    def __init__(self, config: DecoderConfig, mixture: Mixture, rngs: nnx.Rngs) -> None:
        """Create the router and the two projections of all experts."""
        self.activation, self.mixture, self.dtype = config.activation, mixture, config.dtype
        count, hidden, size = mixture.num_experts, config.hidden_size, mixture.expert_size
        self.router = linear(config, hidden, count, rngs, bias=mixture.bias)
        draw = nnx.initializers.lecun_normal(batch_axis=0)
        self.gate_up = nnx.Param(draw(rngs.params(), (count, hidden, 2 * size), config.param_dtype))
        self.down = nnx.Param(draw(rngs.params(), (count, size, hidden), config.param_dtype))
        if mixture.bias:
            self.gate_up_bias = nnx.Param(jnp.zeros((count, 2 * size), config.param_dtype))
            self.down_bias = nnx.Param(jnp.zeros((count, hidden), config.param_dtype))
        if mixture.sigmoid:
            # Float32 in any decoder: the biases are large, and what counts is how little they differ.
            self.choice_bias = nnx.Param(jnp.zeros(count, jnp.float32))
        if mixture.shared_size is not None:
            self.shared = MLP(config, rngs, mixture.shared_size)

    def __call__(self, x: Float[Array, "B T D"], parallel: Parallel = ALONE) -> Float[Array, "B T D"]:
        """Map each token by itself; inside of `jax.shard_map`, by the devices among which the experts are divided."""
        mapped = self._map_all(x, parallel)
        return parallel.reduce(mapped if self.mixture.shared_size is None else mapped + self.shared(x))

    def _map_all(self, x: Float[Array, "B T D"], parallel: Parallel) -> Float[Array, "B T D"]:
        rows, run = x.reshape(-1, x.shape[-1]), partial(self._map, parallel)
        if len(rows) <= _TOKENS:
            return run(rows).reshape(x.shape)
        parts = jnp.pad(rows, ((0, -len(rows) % _TOKENS), (0, 0))).reshape(-1, _TOKENS, rows.shape[1])
        return lax.map(run, parts).reshape(-1, rows.shape[1])[: len(rows)].reshape(x.shape)

    def _map(self, parallel: Parallel, rows: Float[Array, "tokens D"]) -> Float[Array, "tokens D"]:
        weight, expert = self._choose(rows)
        # Every expert maps every token, and of those that are not chosen nothing is taken. JAX's ragged product does as
        # much for each chosen expert of a token, where a device has no kernel for it.
        nothing = jnp.zeros((len(rows), self.mixture.num_experts), jnp.float32)
        share = parallel.own(nothing.at[jnp.arange(len(rows))[:, None], expert].set(weight).T)
        hidden = self._product("td,edf->etf", rows, self.gate_up, self.gate_up_bias if self.mixture.bias else None)
        hidden = jnp.where(share[..., None] > 0, _gated(self.activation, hidden), 0)
        out = self._product("etf,efd->etd", hidden, self.down, self.down_bias if self.mixture.bias else None)
        return (out.astype(jnp.float32) * share[..., None]).sum(axis=0).astype(rows.dtype)

    def _choose(self, rows: Float[Array, "tokens D"]) -> tuple[Float[Array, "tokens E"], Int[Array, "tokens E"]]:
        """Return the experts of each token, and the weights of what they make of it."""
        mixture = self.mixture
        if mixture.sigmoid:
            kernel = self.router.kernel[...].astype(jnp.float32)
            shares = nnx.sigmoid(jnp.dot(rows.astype(jnp.float32), kernel, precision=lax.Precision.HIGHEST))
            liked = self._in_best_groups(shares + self.choice_bias[...][None])
            _, expert = lax.top_k(liked, mixture.experts_per_token)
            weight = jnp.take_along_axis(shares, expert, axis=-1)
        else:
            shares = jax.nn.softmax(self.router(rows).astype(jnp.float32), axis=-1)
            weight, expert = lax.top_k(self._in_best_groups(shares), mixture.experts_per_token)
        if mixture.normalised:
            weight = weight / (weight.sum(axis=-1, keepdims=True) + _TINY)
        return weight * mixture.weight_scale, expert

    def _in_best_groups(self, scores: Float[Array, "tokens experts"]) -> Float[Array, "tokens experts"]:
        """Return scores with -inf for the experts of all but the best groups."""
        mixture = self.mixture
        if mixture.groups == mixture.groups_per_token:
            return scores
        grouped = scores.reshape(len(scores), mixture.groups, -1)
        of_group = lax.top_k(grouped, 2)[0].sum(axis=-1)
        _, best = lax.top_k(of_group, mixture.groups_per_token)
        is_best = (best[..., None] == jnp.arange(mixture.groups)[None, None]).any(axis=1)
        return jnp.where(is_best[..., None], grouped, -jnp.inf).reshape(scores.shape)

    def _product(
        self, indices: str, x: Array, kernel: nnx.Param, bias: nnx.Param | None
    ) -> Float[Array, "E t outputs"]:
        """Multiply with the weights of each expert."""
        out = jnp.einsum(indices, x, kernel[...].astype(self.dtype))
        return out if bias is None else out + bias[...].astype(self.dtype)[:, None]


def _gated(activation: Activation, gate_up: Float[Array, "*batch 2F"]) -> Float[Array, "*batch F"]:
    """Let the first half of the numbers decide what becomes of the second."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    match activation:
        case "silu":
            return nnx.silu(gate) * up
        case "gelu_tanh":
            return nnx.gelu(gate, approximate=True) * up
        case "clamped":
            gate, up = jnp.minimum(gate, _LIMIT), jnp.clip(up, -_LIMIT, _LIMIT)
            return gate * nnx.sigmoid(_SLOPE * gate) * (up + 1)
