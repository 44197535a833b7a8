"""What every way to compute mixtures of experts is held to: float64, token by token, and lists of rows."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from codec_jax.nnx.expert_products import Chosen, Weights
from pallas_kernels.addends import Parts
from pallas_kernels.expert_rows import ROW_GROUP


class Sizes(NamedTuple):
    tokens: int
    num_experts: int
    chosen: int
    hidden: int
    size: int
    bias: bool = False


def random_call(sizes: Sizes, seed: int, dtype: Any, popular: int = 0) -> tuple[Any, Chosen, Weights]:
    """Draw tokens, their experts, and weights; every token's first experts are `popular` of the same."""
    rng = np.random.default_rng(seed)
    tokens, count, chosen, hidden, size, bias = sizes
    order = np.argsort(rng.random((tokens, count - popular)), axis=1) + popular
    first = np.broadcast_to(np.arange(popular), (tokens, popular))
    expert = np.concatenate([first, order], axis=1)[:, :chosen].astype(np.int32)
    share = rng.random((tokens, chosen)).astype(np.float32)

    def draw(*shape: int, scale: float = 1.0) -> Any:
        return jnp.asarray(rng.normal(size=shape) * scale, dtype)

    weights = Weights(
        draw(count, hidden, 2 * size, scale=hidden**-0.5),
        draw(count, size, hidden, scale=size**-0.5),
        *((draw(count, 2 * size), draw(count, hidden)) if bias else (None, None)),
    )
    return draw(tokens, hidden), Chosen(jnp.asarray(expert), jnp.asarray(share)), weights


def exact(x: Any, chosen: Chosen, weights: Weights, activation: str) -> np.ndarray:
    """Compute it in float64; experts that are out of bounds give nothing."""
    x, share, expert = (np.asarray(value, np.float64) for value in (x, chosen.share, chosen.expert))
    gate_up, down = (np.asarray(value, np.float64) for value in weights[:2])
    biases = [0.0 if bias is None else np.asarray(bias, np.float64) for bias in weights[2:]]
    out = np.zeros(x.shape)
    for e in range(len(down)):
        token, place = np.nonzero(expert == e)
        gate, up = np.split(x[token] @ gate_up[e] + (biases[0][e] if weights.gate_up_bias is not None else 0), 2, 1)
        made = gates(activation, gate, up) @ down[e] + (biases[1][e] if weights.down_bias is not None else 0)
        np.add.at(out, token, share[token, place][:, None] * made)
    return out


def gates(activation: str, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    if activation == "gelu_tanh":
        return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    slope = 1.702 if activation == "clamped" else 1.0
    if activation == "clamped":
        gate, up = np.minimum(gate, 7), np.clip(up, -7, 7) + 1
    return gate / (1 + np.exp(-slope * gate)) * up


def random_choices(tokens: int, num_experts: int, chosen: int, depth: int, seed: int) -> tuple[jax.Array, np.ndarray]:
    """Some experts are popular, some choices are elsewhere, and a token is not finite."""
    rng = np.random.default_rng(seed)
    liking = rng.random((tokens, num_experts + 2)) + 2 * (rng.random(num_experts + 2) < rng.random() / 2)
    expert = np.argsort(-liking, axis=1)[:, :chosen].astype(np.int32) - 1  # -1 and E are nobody's
    x = jnp.asarray(rng.normal(size=(tokens, depth)), jnp.bfloat16)
    return x.at[seed % (tokens + 1)].set(jnp.nan), expert


def random_scores(tokens: int, num_experts: int, seed: int, dtype: Any) -> Any:
    """Some are equal, some large, and one token's are not numbers."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(tokens, num_experts)) * 4.0 ** rng.integers(-2, 3, (tokens, 1))
    scores = np.round(scores * 256) / 256
    scores = np.where(rng.random((tokens, num_experts)) < 0.2, scores[:, :1], scores)
    scores[np.arange(tokens) == seed % (tokens + 1)] = np.nan
    return jnp.asarray(scores, dtype)


def in_parts(scores: Any, count: int) -> Parts:
    """Parts and a bias that add up to scores; exactly, as all are multiples of 2^-10 and none is large."""
    rng, exact = np.random.default_rng(count), np.asarray(scores, np.float32)
    bias = 2.0 ** rng.integers(-3, 4, scores.shape[1])
    weights = rng.integers(-2, 3, count) / 4
    weights[0] += 1 - weights.sum()
    parts = exact * weights[:, None, None]
    parts[rng.integers(count)] -= bias
    return Parts(jnp.asarray(rng.permutation(parts), jnp.float32), jnp.asarray(bias, scores.dtype))


def check_choice(scores: Any, chosen: int, normalised: bool, made: tuple[Any, Any]) -> None:
    """Hold experts and shares to float64; those of equal scores are the first."""
    expert, share = (np.asarray(each) for each in made)
    exact = np.asarray(scores, np.float64)
    want = np.argsort(-exact, axis=1, kind="stable")[:, :chosen]
    powers = np.exp(exact - exact.max(axis=1, keepdims=True))
    of_chosen = np.take_along_axis(powers, want, axis=1)
    total = (of_chosen if normalised else powers).sum(axis=1, keepdims=True)
    is_number = ~np.isnan(exact).any(axis=1)
    np.testing.assert_array_equal(expert[is_number], want[is_number])
    np.testing.assert_allclose(share, of_chosen / total, rtol=1e-5, atol=1e-30)
    assert np.isnan(share[~is_number]).all()


def check_order(
    expert: np.ndarray, num_experts: int, size: int, place: Any, tiles: Any, group: int, tile_rows: int
) -> list[tuple[int, list[int]]]:
    """Hold the places of tokens and the tiles to lists; return the first row of each expert, and its tokens."""
    first, order, cut = 0, [], []
    for number in range(num_experts):
        tokens, at = np.nonzero(expert == number)
        assert place[tokens, at].tolist() == list(range(first, first + len(tokens)))
        order.append((first, tokens.tolist()))
        cut += [(number, first + done, min(tile_rows, len(tokens) - done)) for done in range(0, len(tokens), tile_rows)]
        first += -(-len(tokens) // group) * group
    assert first <= size
    assert (place[(expert < 0) | (expert >= num_experts)] == size).all()
    assert list(zip(*(field[: len(cut)] for field in tiles[:3]), strict=True)) == cut
    assert tiles.end[-1] == len(cut)
    assert not tiles.rows[len(cut) :].any()
    return order


def check_rows(x: Any, expert: np.ndarray, num_experts: int, made: Any) -> None:
    rows, place, tiles = jax.tree.map(np.asarray, made)
    x, rows = (np.asarray(each, np.float32) for each in (x, rows))
    # Of so few tokens no expert has more than one tile.
    for first, tokens in check_order(expert, num_experts, len(rows), place, tiles, ROW_GROUP, len(x)):
        np.testing.assert_array_equal(rows[first : first + len(tokens)], x[tokens])
