"""A mixture of experts: the router that chooses a few for each token, and their weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from codec_jax.nnx.decoder_config import DecoderConfig, Mixture
from codec_jax.nnx.expert_products import Chosen, Weights, added_up, map_densely, map_rows
from codec_jax.nnx.mlp import MLP, linear
from codec_jax.nnx.parallel import ALONE, Parallel
from codec_jax.nnx.parts import adds_up_experts, router_scores
from pallas_kernels.addends import Shares
from pallas_kernels.hopper import choose

#: Added to sums that are divided by: of sigmoids, all of a token's may be 0.
_TINY = 1e-20


class Experts(nnx.Module):
    """A router, and gated MLPs of which each token goes through a few, and perhaps one that all go through."""

    def __init__(self, config: DecoderConfig, mixture: Mixture, rngs: nnx.Rngs) -> None:
        """Create the router and the two projections of all experts."""
        self.config, self.mixture = config, mixture
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

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Map each token by itself, so that it can be differentiated: every expert maps every token."""
        rows = x.reshape(-1, x.shape[-1])
        mapped = map_densely(rows, self._choose(rows), self._weights(), self.config.activation)
        return self._with_shared(x, mapped.reshape(x.shape))

    def decode(self, x: Float[Array, "B T D"], parallel: Parallel = ALONE) -> Float[Array, "B T D"] | Shares:
        """Map each token by its experts alone; of several devices each by those that it has, and all shares add up."""
        rows, mixture = x.reshape(-1, x.shape[-1]), self.mixture
        chosen = self._choose(rows, parallel.has_kernels)
        chosen = chosen._replace(expert=parallel.here(chosen.expert, mixture.num_experts))
        run = map_densely if parallel.differentiable else map_rows
        mapped = run(rows, chosen, self._weights(), self.config.activation)
        if isinstance(mapped, Shares):
            if mixture.shared_size is None and adds_up_experts(self.config, parallel, mixture.experts_per_token):
                return mapped
            mapped = added_up(mapped, x.dtype)
        return self._with_shared(x, mapped.reshape(x.shape))

    def _with_shared(self, x: Float[Array, "B T D"], mapped: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return mapped if self.mixture.shared_size is None else mapped + self.shared(x)

    def _weights(self) -> Weights:
        names = Weights._fields if self.mixture.bias else ("gate_up", "down")
        return Weights(**{name: getattr(self, name)[...].astype(self.config.dtype) for name in names})

    def _choose(self, rows: Float[Array, "tokens D"], has_kernels: bool = False) -> Chosen:
        mixture = self.mixture
        if mixture.sigmoid:
            kernel = self.router.kernel[...].astype(jnp.float32)
            shares = nnx.sigmoid(jnp.dot(rows.astype(jnp.float32), kernel, precision=lax.Precision.HIGHEST))
            liked = self._in_best_groups(shares + self.choice_bias[...][None])
            _, expert = lax.top_k(liked, mixture.experts_per_token)
            share = jnp.take_along_axis(shares, expert, axis=-1)
        else:
            dtype, is_of_all = self.config.dtype, mixture.groups == mixture.groups_per_token
            if has_kernels and is_of_all and choose.why_not(mixture.num_experts, dtype, jax.devices()[0]) is None:
                options = {"chosen": mixture.experts_per_token, "normalised": mixture.normalised}
                expert, share = choose.choose(router_scores(self.router, rows), dtype, **options)
                return Chosen(expert, share * mixture.weight_scale)
            shares = jax.nn.softmax(self.router(rows).astype(jnp.float32), axis=-1)
            share, expert = lax.top_k(self._in_best_groups(shares), mixture.experts_per_token)
        if mixture.normalised:
            share = share / (share.sum(axis=-1, keepdims=True) + _TINY)
        return Chosen(expert, share * mixture.weight_scale)

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
