"""Tokens drawn by rows: each device draws for some of the requests, and all know what all drew."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from codec_jax.nnx import SamplingParams
from codec_jax.nnx.parallel import Parallel
from codec_jax.nnx.sampling import History, RowOptions, draw

WIDTH, VOCAB = 16, 64
ROWS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, seed=1),
    SamplingParams(temperature=1.3, seed=2, top_k=9, top_p=0.8, top_logprobs=3),
    SamplingParams(temperature=0.9, seed=3, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    SamplingParams(temperature=1.0, seed=4, min_p=0.1, logit_bias={5: 4.0, 6: -8.0}, top_logprobs=20),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.0, top_logprobs=1),
]


@pytest.mark.parametrize("penalties", [False, True])
@pytest.mark.parametrize(("sizes", "rows"), [((1, 2), 7), ((2, 2), 3), ((4, 1), 7), ((2, 4), 1)], ids=str)
def test_devices_that_divide_rows_draw_what_one_device_draws(
    sizes: tuple[int, int], rows: int, penalties: bool
) -> None:
    """Numbers of the products are whole, so that logits are the same bit by bit; one row has no finite ones."""
    mesh = Mesh(np.reshape(jax.devices("cpu")[: sizes[0] * sizes[1]], sizes), ("context", "tensor"))
    rng = np.random.default_rng(rows)
    parallel = Parallel.of(mesh)
    hidden = rng.integers(-2, 3, (rows, WIDTH)).astype(np.float32)
    hidden[rows - 1, 0] = np.nan if rows == 7 else 1
    head = rng.integers(-2, 3, (WIDTH, VOCAB)).astype(np.float32)
    options, position = RowOptions.of(ROWS[:rows], VOCAB), rng.integers(0, 100, rows)
    seen = rng.random((rows, VOCAB)) < 0.2
    history = History(seen, rng.integers(0, 3, (rows, VOCAB)).astype(np.uint16)) if penalties else None

    def divided(hidden, columns, *rest):
        own_logits = parallel.deal(lambda x: x @ columns, hidden)
        options, history, position = rest
        drawn = draw(own_logits, parallel.own(options), history, parallel.own(position), parallel.own_rows(rows))
        return parallel.pool(drawn, rows), parallel.join(own_logits, axis=0)[:rows]

    arguments = hidden, head, options, history, position
    specs = PartitionSpec(), PartitionSpec(None, parallel.axes), PartitionSpec(), PartitionSpec(), PartitionSpec()
    run = jax.jit(jax.shard_map(divided, mesh=mesh, in_specs=specs, out_specs=PartitionSpec()))
    got, logits = run(*arguments)
    np.testing.assert_array_equal(logits, hidden @ head)
    want = jax.jit(draw)(jnp.asarray(hidden @ head), options, history, position)
    sound = np.isfinite(hidden).all(axis=1)
    np.testing.assert_array_equal(got.finite, sound)
    for field in ("token", "top_tokens"):
        assert getattr(got, field).dtype == jnp.int32
        np.testing.assert_array_equal(getattr(got, field)[sound], getattr(want, field)[sound])
    for field in ("logprob", "top_logprobs"):
        np.testing.assert_allclose(getattr(got, field)[sound], getattr(want, field)[sound], rtol=1e-6, atol=1e-6)
