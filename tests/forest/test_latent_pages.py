"""Pages of latents of one byte a number: what they hold, what they count, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from codec_jax import Forest, LatentPages, make_plan
from codec_jax.attention import forest_attention
from codec_jax.forest import NO_SLOT

LATENT, ROPE = 256, 6
SIZE = LATENT + ROPE


def test_numbers_of_one_byte_are_those_written_up_to_rounding_and_infinities_are_counted() -> None:
    """Each 128 of them over a scale of their own, rounded to 4 significant bits; rotated keys to 8."""
    rng, slots = np.random.default_rng(0), np.array([[9, 30, NO_SLOT], [17, -1, 0]])
    rows = rng.normal(size=(2, 3, 1, SIZE)).astype(np.float32) * 10.0 ** rng.integers(-30, 30, (2, 3, 1, 1))
    rows[0, 0, 0, :LATENT] *= np.geomspace(1e-6, 1, LATENT)
    rows[1, 0, 0, :128] = 0.0
    rows[1, 2] = rng.normal(size=(1, SIZE))
    rows[1, 2, 0, [0, 1, 2, LATENT, LATENT + 1]] = [np.inf, -np.inf, np.nan, np.nan, np.inf]
    rows[0, 2, 0, 0] = np.inf  # not stored
    pages = LatentPages.zeros(5, 8, SIZE, jnp.float8_e4m3fn, rope=ROPE)
    after = jax.jit(LatentPages.write)(pages, slots, rows)
    held = np.asarray(after.rows(np.arange(5)), np.float64).reshape(-1, SIZE)
    assert np.isnan(held[0, LATENT:]).all()  # of the row with NaN, rows[1, 2]
    held[0, LATENT:] = 0.0
    assert np.isfinite(held).all()
    assert after.quantisation.saturated.tolist() == [2]
    meant = rows.astype(np.float64)
    largest = np.abs(meant[1, 2, 0, 3:128]).max()
    meant[1, 2, 0, :3] = [largest, -largest, 0.0]
    meant[1, 2, 0, LATENT:] = 0.0
    for at, slot in np.ndenumerate(slots):
        if not 0 <= slot < 40:
            continue
        row, want = held[slot], meant[at][0]
        for part in range(0, LATENT, 128):
            of_part = want[part : part + 128]
            # Half a unit in the last of 3 bits after the leading one, or of the smallest number there is.
            bound = np.maximum(np.abs(of_part) / 16, np.abs(of_part).max() / 448 * 2.0**-10) * (1 + 1e-6)
            assert (np.abs(row[part : part + 128] - of_part) <= bound + 1e-38).all()
        assert (np.abs(row[LATENT:] - want[LATENT:]) <= np.abs(want[LATENT:]) / 256).all()
    others = np.setdiff1d(np.arange(40), slots)
    assert not held[others].any()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_row_that_is_not_finite_is_marked_in_its_rotated_key_alone(dtype: type) -> None:
    rows = np.ones((1, 4, 1, SIZE), np.float32)
    rows[0, 0, 0, 3], rows[0, 1, 0, LATENT], rows[0, 2, 0, LATENT - 1] = np.nan, -np.inf, 3.4e38
    pages = LatentPages.zeros(1, 8, SIZE, dtype).write(np.arange(4)[None], rows, rope=ROPE)
    held = np.asarray(pages.latent[0, :4, 0], np.float32)
    assert np.isnan(held[:3, LATENT:]).all()
    want = np.ones((4, LATENT))
    want[0, 3] = want[2, LATENT - 1] = 0.0
    np.testing.assert_array_equal(held[:, :LATENT], want)
    assert (held[3] == 1).all()


def test_tokens_move_with_their_scales_and_rotated_keys() -> None:
    pages = LatentPages.zeros(4, 8, SIZE, jnp.float8_e4m3fn, rope=ROPE)
    rows = np.random.default_rng(0).normal(size=(1, 2, 1, SIZE)).astype(np.float32) * [[[[3.0]], [[0.01]]]]
    pages = pages.write(np.array([[9, 20]]), rows)
    moved = pages.move(np.array([[9, 20, 3]]), np.array([[20, 1, NO_SLOT]]))
    before, after = (np.asarray(each.rows(np.arange(4))).reshape(-1, SIZE) for each in (pages, moved))
    np.testing.assert_array_equal(after[[20, 1, 9]], before[[9, 20, 9]])
    assert np.count_nonzero(after.any(axis=1)) == 3


def test_latents_of_one_byte_may_have_no_rotated_keys() -> None:
    forest, heads = Forest.from_nodes([-1], [9], [0]), {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 128}
    plan = make_plan(forest, **heads, value_head_dim=128, num_ctas=1)
    rng = np.random.default_rng(0)
    rows, query = (rng.normal(size=shape).astype(np.float32) for shape in ((1, 9, 1, 128), (1, 1, 2, 128)))
    pages = LatentPages.zeros(3, 16, 128, jnp.float8_e4m3fn, rope=0).write(np.arange(16, 25)[None], rows)
    pages = pages.move(np.arange(16, 25)[None], np.arange(9)[None])
    held = np.asarray(pages.rows(np.arange(1)), np.float64).reshape(16, 128)[:9]
    np.testing.assert_allclose(held, rows[0, :, 0], atol=0.2)
    weights = np.exp(held @ query[0, 0].T.astype(np.float64) * 128**-0.5)
    want = (weights / weights.sum(0)).T @ held
    out = forest_attention(jnp.asarray(query), pages, None, forest, plan, implementation="xla")
    np.testing.assert_allclose(out[0, 0], want, atol=0.02)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^dtype: expected float32, bfloat16, float8_e4m3fn or float16, got float8_e5"
    ):
        LatentPages.zeros(4, 8, SIZE, jnp.float8_e5m2, rope=ROPE)
    for name, sizes in {"num_pages": (-1, 8, SIZE), "page_size": (4, 0, SIZE), "size": (4, 8, "x")}.items():
        with pytest.raises(ValueError, match=rf"^{name}: expected an integer of at least [01], got (-1|0|'x')"):
            LatentPages.zeros(*sizes)
    with pytest.raises(ValueError, match=r"^rope: expected an integer of at least 0, got None"):
        LatentPages.zeros(4, 8, SIZE, jnp.float8_e4m3fn)
    for rope in (7, SIZE):
        with pytest.raises(
            ValueError, match=rf"^size: expected rope and a multiple of 128 .*, got {rope} \+ {SIZE - rope}"
        ):
            LatentPages.zeros(4, 8, SIZE, jnp.float8_e4m3fn, rope=rope)
    pages = LatentPages.zeros(4, 8, SIZE, jnp.float8_e4m3fn, rope=ROPE)
    with pytest.raises(ValueError, match=rf"^rows: expected shape \(1, 1, 1, {SIZE}\), a row for each slot, got "):
        pages.write(np.zeros((1, 1), int), jnp.ones((1, 1, 1, LATENT)))
    pages = LatentPages.zeros(4, 8, SIZE)
    for rope in (-1, SIZE, 2.0):
        with pytest.raises(ValueError, match=rf"^rope: expected an integer of at least 0.*, got {rope}"):
            pages.write(np.zeros((1, 1), int), jnp.ones((1, 1, 1, SIZE)), rope=rope)
