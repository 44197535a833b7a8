"""The benchmark of whole decode steps, as far as it shows without a GPU: its variants, counts, and rows."""

from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import decode_floor, decode_step, decoding
from benchmarks.decode_floor import experts_chosen, floors, uniformly_chosen, weight_bytes
from benchmarks.decode_step import STEPS, SharedDocument, contiguous, paged, plans_of
from codec_jax import Window
from codec_jax.nnx import Decoder, DecoderConfig, Mixture, random_decoder

FLOAT32 = {"dtype": jnp.float32, "param_dtype": jnp.float32}
CONFIG = DecoderConfig(48, 32, 48, num_layers=2, num_q_heads=4, num_kv_heads=2, head_dim=16, **FLOAT32)
CASE = SharedDocument(document=75, requests=3, own=9)
#: Two layers as those of gpt-oss: one with a window that begins in the document, sinks, and experts with biases.
MIXED = replace(
    CONFIG, windows=(Window(40), None), sinks=True, qk_norm=False, tied_embeddings=False,
    mixture=Mixture(num_experts=8, experts_per_token=2, expert_size=16, bias=True),
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Decoder:
    return random_decoder(CONFIG)


@pytest.fixture(scope="module")
def mixed() -> Decoder:
    return random_decoder(MIXED)


def test_all_variants_decode_the_same_in_every_call(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The contiguous one is attended by JAX's own attention, and its pages are laid out anew."""
    step = paged(model, CASE, share=True)
    others = paged(model, CASE, share=False), contiguous(model, CASE, "xla")
    first = np.asarray(step(1))
    for tokens in (1, STEPS):
        expected = np.asarray(step(tokens))
        assert expected.shape == (3, 48)
        for other in others:
            np.testing.assert_allclose(other(tokens), expected, rtol=2e-4, atol=2e-4)
    assert (np.asarray(step()) == expected).all()
    assert (np.asarray(step(temperature=1.0)) != expected).any()
    # They attend: other values in the document, or in what requests have of their own, make other logits.
    for part in ("_DOCUMENT_DEVIATION", "_OWN_DEVIATION"):
        with monkeypatch.context() as changed:
            changed.setattr(decode_step, part, -getattr(decode_step, part))
            step._cache = decode_step.random_cache(CONFIG, CASE)
        apart = np.linalg.norm(np.asarray(step(1)) - first, axis=1) / np.linalg.norm(first, axis=1)
        assert apart.min() > decoding.MAX_DIFFERENCE


def test_layers_with_windows_have_plans_of_their_own_and_cudnn_is_refused(mixed: Decoder) -> None:
    forest, num_pages = CASE.forest()
    windows = [plan.arrays.window for plan in plans_of(MIXED, forest, num_pages)]
    assert windows == [None, Window(40)]
    step, other = (paged(mixed, CASE, share) for share in (True, False))
    for tokens in (1, STEPS):
        np.testing.assert_allclose(other(tokens), step(tokens), rtol=2e-4, atol=2e-4)
    with pytest.raises(ValueError, match="model: expected one without windows, sinks and softcap"):
        contiguous(mixed, CASE)
    # As the sampler, and plain where there is one window.
    assert plans_of(CONFIG, forest, num_pages).arrays.window is None
    assert plans_of(CONFIG, forest, num_pages).heads.kv_dtype == jnp.float32
    one_byte = replace(CONFIG, kv_dtype=jnp.float8_e4m3fn)
    assert plans_of(one_byte, forest, num_pages).heads.kv_dtype == jnp.float8_e4m3fn


def test_weights_count_once_and_an_embedding_only_where_it_is_the_head_too(model: Decoder) -> None:
    layer = 32 * (64 + 32 + 32) + 64 * 32 + 3 * 32 * 48 + 2 * 32 + 2 * 16
    assert weight_bytes(model) == 4 * (2 * layer + 48 * 32 + 32)
    untied = random_decoder(replace(CONFIG, tied_embeddings=False))
    assert weight_bytes(untied) == weight_bytes(model)


def test_the_floor_is_weights_and_unique_tokens_and_the_roofline_counts_products(model: Decoder) -> None:
    row = floors(model, CASE)
    # A token has K and V of two heads of 16 values of 4 bytes in 2 layers; 8.5 of 16 tokens are there on average.
    unique = 75 + 3 * (9 + 8.5)
    assert row["unique_kv_bytes"] == int(unique * 512)
    assert row["total_kv_bytes"] == int((3 * 75 + 3 * 17.5) * 512)
    assert row["floor_us"] == pytest.approx((row["weight_bytes"] + unique * 512) / 4.52e6)
    assert row["roofline_us"] == pytest.approx(row["floor_us"])
    many = floors(model, SharedDocument(document=120_000, requests=4096))
    assert many["roofline_us"] == pytest.approx(
        2 * many["weight_bytes"] / 4 * 4096 / 700e6 + 4096 * (120_000 + 128 + 8.5) * 4 * 4 * 16 * 2 / 700e6
    )


@pytest.mark.parametrize("window", [None, Window(1), Window(20), Window(95), Window(1000), Window(32, chunked=True)])
def test_a_window_shows_the_tokens_that_steps_see_in_the_mean(window: Window | None) -> None:
    seen = np.zeros(2)
    for step in range(STEPS):
        end = CASE.document + CASE.own + step + 1
        first = 0 if window is None else window.first_position(end - 1)
        positions = [at for at in range(end) if at >= first]
        seen += sum(at < CASE.document for at in positions), sum(at >= CASE.document for at in positions)
    assert CASE.seen(window) == pytest.approx(tuple(seen / STEPS))


def test_floors_count_windows_and_the_experts_that_somebody_goes_through(mixed: Decoder, monkeypatch) -> None:
    for block in mixed.blocks:  # all tokens like the same two
        block.mlp.router.kernel[...] *= 0
        block.mlp.router.bias[...] = jnp.arange(8.0)
    assert experts_chosen(mixed, CASE) == 2
    row = floors(mixed, CASE)
    one = 32 * 2 * 16 + 16 * 32 + 2 * 16 + 32  # numbers of an expert
    # Queries, keys, values; the product after them; router; sinks; norms.
    layer = 32 * (64 + 32 + 32) + 64 * 32 + (32 + 1) * 8 + 4 + 2 * 32
    assert row["weight_bytes"] == 4 * (2 * (layer + 2 * one) + 48 * 32 + 32)
    assert (row["experts"], row["experts_of_uniform_choice"]) == (2.0, 8 * (1 - 0.75**3))
    # A layer sees all, the other one its window: what requests have of their own, and then the document.
    own = 9 + 8.5
    assert row["unique_kv_bytes"] == int(256 * (75 + 3 * own + (40 - own) + 3 * own))
    assert row["total_kv_bytes"] == int(256 * 3 * (75 + own + 40))
    assert row["floor_us"] == pytest.approx((row["weight_bytes"] + row["unique_kv_bytes"]) / 4.52e6)
    # Of many requests, products take longer than reading, but not in the layer with a window.
    monkeypatch.setattr(decode_floor, "experts_chosen", lambda *_: 2.0)
    case = SharedDocument(document=100_000, requests=4096)
    read, multiplied = 256 * 4096 * 40 / 4.52e6, 2 * row["weight_bytes"] / 4 * 4096 + 256 * 4096 * (100_000 + 136.5)
    assert floors(mixed, case)["roofline_us"] == pytest.approx(read + multiplied / 700e6)


def test_random_requests_go_their_own_ways_through_the_experts() -> None:
    """What they share, and what their layers make of it, must not send them all to the same experts."""
    mixture = Mixture(num_experts=32, experts_per_token=2, expert_size=16)
    sizes = {"num_layers": 3, "hidden_size": 128, "vocab_size": 512, "head_dim": 64}
    model = random_decoder(replace(CONFIG, **sizes, mixture=mixture))
    case = SharedDocument(document=2048, requests=16, own=16)
    uniform = uniformly_chosen(model, case)
    assert uniform == pytest.approx(32 * (1 - (30 / 32) ** 16))
    assert 0.8 * uniform < experts_chosen(model, case) < uniform + 1


def test_logits_that_are_further_apart_than_rounding_are_refused() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 48))
    assert decoding.difference(logits * [[1.0], [1.01], [0.98]], logits) == pytest.approx(0.02)
    for wrong in (logits[::-1], logits * np.nan):
        with pytest.raises(ValueError, match="logits: expected a relative difference of at most"):
            decoding.difference(wrong, logits)


def test_kernels_of_a_token_are_summed_by_the_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = [
        ("fusion_12", 2.0),
        ("cmap_body_mosaic_gpu_kernel", 5.0),
        ("fusion_7_1", 3.0),
        ("loop_add_fusion", 6.0),
        ("split_heads_mosaic_gpu_kernel", 0.75),
        ("add_norm_mosaic_gpu_kernel", 0.25),
        ("arranged_mosaic_gpu_kernel", 10.0),
        ("cmap_experts_mosaic_gpu_kernel", 9.0),
        ("gemm_fusion_dot_general_0", 7.0),
        ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_splitK_TNT", 8.0),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_cutlass", 4.0),
    ]
    monkeypatch.setattr(decoding, "kernels_of", lambda step: ran * STEPS)
    row = decoding.kernel_fields(None)
    assert (row["kernel_us"], row["launches"]) == (55.0, 11.0)
    parts = {part: row[f"{part}_us"] for part in ("attention", "products", "experts", "other")}
    assert parts == {"attention": 9.0, "products": 15.0, "experts": 9.0, "other": 22.0}
    monkeypatch.setattr(decoding, "kernels_of", lambda step: [("fusion", 2.0)])
    with pytest.raises(RuntimeError, match="kernels: expected some with mosaic_gpu or cudnn"):
        decoding.kernel_fields(None)


def test_a_variant_that_fails_keeps_its_place_and_logits_are_held_to_the_first(model, monkeypatch) -> None:
    def step(scale: float) -> Callable:
        made = lambda **_: scale * np.arange(1.0, 97.0).reshape(2, 48)  # noqa: E731
        made.compile_seconds = 1.0
        return lambda *_: made

    makers = {"shared": step(1.0), "unshared": step(1.01), "cudnn": lambda *_: 1 / 0}
    monkeypatch.setattr(decoding, "VARIANTS", makers)
    first, failed, second = decoding.measure_all(model, [CASE], ["shared", "cudnn", "unshared"], {"date": "today"})
    assert (failed["wall_us"], failed["error"]) == (None, "ZeroDivisionError: division by zero")
    assert min(first["wall_us"], first["top_p_wall_us"], second["wall_us"]) > 0
    assert (first["logits_difference"], second["logits_difference"]) == (0.0, pytest.approx(0.01))
    assert failed["floor_us"] == first["floor_us"] > 0
    # There is no CUPTI here, which costs a row no more than its kernels.
    assert first["kernel_us"] is None
    assert "CUPTI" in first["kernel_error"]
