"""The benchmark of whole decode steps, as far as it shows without a GPU: its variants, counts, and rows."""

from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import decode_step, decoding
from benchmarks.decode_step import STEPS, SharedDocument, contiguous, paged, weight_bytes
from codec_jax.nnx import Decoder, DecoderConfig, random_decoder

FLOAT32 = {"dtype": jnp.float32, "param_dtype": jnp.float32}
CONFIG = DecoderConfig(48, 32, 48, num_layers=2, num_q_heads=4, num_kv_heads=2, head_dim=16, **FLOAT32)
CASE = SharedDocument(document=75, requests=3, own=9)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return random_decoder(CONFIG)


def test_all_variants_decode_the_same_in_every_call(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The contiguous one is attended by JAX's own attention, and its pages are laid out anew."""
    step = paged(model, CASE, share=True)
    others = paged(model, CASE, share=False), contiguous(model, CASE, "xla")
    for tokens in (1, STEPS):
        expected = np.asarray(step(tokens))
        assert expected.shape == (3, 48)
        for other in others:
            np.testing.assert_allclose(other(tokens), expected, rtol=2e-4, atol=2e-4)
    assert (np.asarray(step()) == expected).all()
    assert (np.asarray(step(temperature=1.0)) != expected).any()
    # They attend: other values in the pages make other logits.
    monkeypatch.setattr(decode_step, "_VALUE_DEVIATION", -decode_step._VALUE_DEVIATION)
    step._cache = decode_step.random_cache(CONFIG, CASE.forest()[1])
    assert np.abs(np.asarray(step()) - expected).max() > 0.1 * np.abs(expected).max()


def test_weights_count_once_and_an_embedding_only_where_it_is_the_head_too(model: Decoder) -> None:
    layer = 32 * (64 + 32 + 32) + 64 * 32 + 3 * 32 * 48 + 2 * 32 + 2 * 16
    assert weight_bytes(model) == 4 * (2 * layer + 48 * 32 + 32)
    untied = random_decoder(replace(CONFIG, tied_embeddings=False))
    assert weight_bytes(untied) == weight_bytes(model)


def test_the_floor_is_weights_and_unique_tokens_and_the_roofline_counts_products(model: Decoder) -> None:
    row = decoding.floors(model, CASE)
    # A token has K and V of two heads of 16 values of 4 bytes in 2 layers; 8.5 of 16 tokens are there on average.
    unique = 75 + 3 * (9 + 8.5)
    assert row["unique_kv_bytes"] == int(unique * 512)
    assert row["total_kv_bytes"] == int((3 * 75 + 3 * 17.5) * 512)
    assert row["floor_us"] == pytest.approx((row["weight_bytes"] + unique * 512) / 4.52e6)
    assert row["roofline_us"] == pytest.approx(row["floor_us"])
    many = decoding.floors(model, SharedDocument(document=120_000, requests=4096))
    assert many["roofline_us"] == pytest.approx(
        many["weight_bytes"] * 4096 / 700e6 + 4096 * (120_000 + 128 + 8.5) * 4 * 4 * 16 * 2 / 700e6
    )


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
        ("split_heads_mosaic_gpu_kernel", 1.0),
        ("cmap_experts_mosaic_gpu_kernel", 9.0),
        ("gemm_fusion_dot_general_0", 7.0),
        ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_splitK_TNT", 8.0),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_cutlass", 4.0),
    ]
    monkeypatch.setattr(decoding, "kernels_of", lambda step: ran * STEPS)
    row = decoding.kernel_fields(None)
    assert (row["kernel_us"], row["launches"]) == (45.0, 9.0)
    assert (row["attention_us"], row["products_us"], row["other_us"]) == (9.0, 24.0, 12.0)
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
    # There is no CUPTI here, which costs a row no more than its kernels.
    assert first["kernel_us"] is None
    assert "CUPTI" in first["kernel_error"]
