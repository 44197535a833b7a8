"""Arguments of FlashDecoding's call: honoured, ignored, or refused by name."""

from typing import Any

import chex
import jax
import numpy as np
import pytest
from paged_rows import (
    BLOCKS,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    PAGE,
    ROOM,
    ROWS,
    Rows,
    arrays,
    assert_attends,
    attend_each,
    no_plans,  # noqa: F401
    table,
)

from codec_jax.flash_decoding import flash_attn_with_kvcache, plans

# What upstream takes, with its defaults: flash-attn 2.8 and 3, after q, k_cache and v_cache.
UPSTREAM = {
    "k": None,
    "v": None,
    "qv": None,
    "rotary_cos": None,
    "rotary_sin": None,
    "cache_seqlens": None,
    "cache_batch_idx": None,
    "cache_leftpad": None,
    "block_table": None,
    "page_table": None,
    "cu_seqlens_q": None,
    "cu_seqlens_k_new": None,
    "max_seqlen_q": None,
    "rotary_seqlens": None,
    "q_descale": None,
    "k_descale": None,
    "v_descale": None,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "attention_chunk": 0,
    "softcap": 0.0,
    "rotary_interleaved": True,
    "scheduler_metadata": None,
    "alibi_slopes": None,
    "num_splits": 0,
    "pack_gqa": None,
    "sm_margin": 0,
    "return_softmax_lse": False,
}


def test_every_argument_of_flash_attn_may_have_its_default() -> None:
    given, rows = arrays(), Rows(table(2), np.full(ROWS, 50))
    out = flash_attn_with_kvcache(*given, **{**UPSTREAM, **rows._asdict()})
    chex.assert_trees_all_close(np.asarray(out, np.float64), attend_each(given, rows)[0], atol=1e-5)


@pytest.mark.parametrize(
    "hint",
    [
        {"num_splits": 3},
        {"pack_gqa": True},
        {"sm_margin": 8},
        {"scheduler_metadata": np.zeros(3)},
        {"max_seqlen_q": 1},
        {"rotary_interleaved": False},
    ],
    ids=lambda hint: next(iter(hint)),
)
def test_arguments_that_say_how_to_compute_are_ignored(hint: dict[str, Any]) -> None:
    assert_attends(arrays(), Rows(table(2), np.full(ROWS, 50)), **hint)


REFUSED = {
    "k": np.zeros((ROWS, 1, KV_HEADS, HEAD_DIM)),
    "v": np.zeros((ROWS, 1, KV_HEADS, HEAD_DIM)),
    "qv": np.zeros((ROWS, 1, HEADS, HEAD_DIM)),
    "rotary_cos": np.zeros((64, 16)),
    "rotary_sin": np.zeros((64, 16)),
    "rotary_seqlens": np.zeros(ROWS, np.int32),
    "cache_leftpad": np.arange(ROWS),
    "page_table": np.zeros((ROWS, 1), np.int32),
    "cu_seqlens_q": np.arange(ROWS + 1),
    "cu_seqlens_k_new": np.arange(ROWS + 1),
    "q_descale": np.full((ROWS, 1), 0.5),
    "k_descale": np.full((ROWS, 1), 0.5),
    "v_descale": 2.0,
    "alibi_slopes": np.zeros(HEADS),
}
#: Of its forks, for what is called sinks here.
OTHER_NAMES = ("s_aux", "learnable_sink")


def test_every_argument_of_flash_attn_is_honoured_ignored_or_refused() -> None:
    honoured = {"cache_seqlens", "cache_batch_idx", "block_table", "softmax_scale", "causal", "return_softmax_lse"}
    honoured |= {"window_size", "attention_chunk", "softcap"}
    ignored = {"num_splits", "pack_gqa", "sm_margin", "scheduler_metadata", "max_seqlen_q", "rotary_interleaved"}
    assert honoured | ignored | REFUSED.keys() == UPSTREAM.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name_with_the_way_out(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got .*; \w+"):
        flash_attn_with_kvcache(*arrays(), block_table=table(2), cache_seqlens=50, **{name: REFUSED[name]})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cache_leftpad", np.zeros(ROWS, np.int32)),
        ("k_descale", 1.0),
        ("v_descale", np.ones((ROWS, 1))),
        ("softcap", None),
        ("window_size", None),
        ("attention_chunk", None),
    ],
)
def test_a_value_that_asks_for_nothing_is_taken(name: str, value: object) -> None:
    usual = flash_attn_with_kvcache(*arrays(), block_table=table(2), cache_seqlens=50)
    got = flash_attn_with_kvcache(*arrays(), block_table=table(2), cache_seqlens=50, **{name: value})
    np.testing.assert_array_equal(got, usual)


def test_k_and_v_are_refused_where_flash_attn_has_them_too() -> None:
    new = np.zeros((ROWS, 1, KV_HEADS, HEAD_DIM))
    with pytest.raises(ValueError, match=r"^k: expected None, got an array of shape .*; \w+"):
        flash_attn_with_kvcache(*arrays(), new, new, block_table=table(2), cache_seqlens=50)  # type: ignore[call-overload]


def test_what_is_no_array_is_shown_as_it_is() -> None:
    with pytest.raises(ValueError, match=r"^cache_leftpad: expected 0, got \(1, 0\); "):
        flash_attn_with_kvcache(*arrays(), block_table=table(2), cache_seqlens=50, cache_leftpad=(1, 0))


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_sinks_are_named_where_they_come_by_another_name(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: expected None, got an array of shape \(4,\); pass it as sinks"):
        flash_attn_with_kvcache(*arrays(), block_table=table(2), cache_seqlens=50, **{name: np.zeros(HEADS)})


def test_more_rows_without_causal_than_a_tile_can_count_are_refused_by_what_the_caller_gave() -> None:
    cache = np.ones((8, 16, 8, 8), np.float32)
    with pytest.raises(
        ValueError, match=r"^q: expected at most 1023 query tokens of 32 heads without causal, got 1024"
    ):
        flash_attn_with_kvcache(
            np.ones((2, 1024, 32, 8), np.float32), cache, cache, block_table=[[0, 1], [0, 2]], cache_seqlens=20
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window_size": 5}, r"^window_size: expected two integers, .*got 5"),
        ({"window_size": (1, 2, 3)}, r"^window_size: expected two integers, .*got \(1, 2, 3\)"),
        (
            {"window_size": {"left": 8, "right": 0}},
            r"^window_size: expected two integers, .*got \{'left': 8, 'right': 0\}",
        ),
        ({"window_size": {8: 0, 0: 0}}, r"^window_size: expected two integers, .*got \{8: 0, 0: 0\}"),
        ({"window_size": {8, 0}}, r"^window_size: expected two integers, .*got \{"),
        ({"window_size": np.array(8)}, r"^window_size: expected two integers, .*got array\(8\)"),
        ({"softcap": np.ones(2)}, r"^softcap: expected a finite number, got array"),
        ({"softcap": -1.0}, r"^softcap: expected a positive number or None, got -1.0"),
        ({"implementation": "fast"}, r"^implementation: expected .*got 'fast'"),
        ({"sinks": np.ones(4, int)}, r"^sinks: expected float32, bfloat16 or float16, got int"),
        ({"causal": np.ones(2, bool)}, r"^causal: expected True or False, got array"),
        ({"causal": "yes"}, r"^causal: expected True or False, got 'yes'"),
        ({"return_softmax_lse": "no"}, r"^return_softmax_lse: expected True or False, got 'no'"),
        ({"block_table": [[0, 1, 2], [0]]}, r"^block_table: expected rows of one length"),
        ({"q": None}, r"^q: expected an array, got NoneType"),
        ({"cache_seqlens": np.full(ROWS, 2**63, np.uint64)}, r"^cache_seqlens: .*got .* = 9223372036854775808"),
    ],
)
def test_values_of_other_kinds_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    for tokens in (50, 0):  # of empty caches, too
        arguments: dict[str, Any] = {**arrays()._asdict(), "block_table": table(2), "cache_seqlens": tokens, **changes}
        with pytest.raises(ValueError, match=message):
            flash_attn_with_kvcache(**arguments)


@pytest.mark.parametrize("name", ["softcap", "causal"])
def test_numbers_that_are_traced_are_refused_by_name(name: str) -> None:
    def call(value: Any) -> Any:
        return flash_attn_with_kvcache(*arrays(), block_table=table(2), cache_seqlens=50, **{name: value})

    with pytest.raises(ValueError, match=rf"^{name}: expected "):
        jax.jit(call)(1.0)


def test_an_unknown_argument_is_refused_even_if_it_is_none() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'cache_seqlen'"):
        flash_attn_with_kvcache(*arrays(), block_table=table(2), cache_seqlen=None)  # type: ignore[call-overload]


def test_an_argument_that_flash_attn_does_not_have_is_refused_as_python_does() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'blocktable'"):
        flash_attn_with_kvcache(*arrays(), blocktable=table(2))


WRONG = {
    "q without heads": ({"q": np.zeros((ROWS, HEADS, HEAD_DIM), np.float32)}, r"^q: expected shape \[batch, seqlen_q"),
    "q of integers": ({"q": np.zeros((ROWS, 1, HEADS, HEAD_DIM), np.int32)}, r"^q: expected float32.*got int32"),
    "another head size": ({"k_cache": np.zeros((BLOCKS, PAGE, 2, 32), np.float32)}, r"^k_cache: .* = 64\], got .*32"),
    "kv heads that do not divide": (
        {"k_cache": np.zeros((BLOCKS, PAGE, 3, HEAD_DIM), np.float32)},
        r"^k_cache: expected .*divides nheads = 4, got 3",
    ),
    "caches of integers": (
        {name: np.zeros((BLOCKS, PAGE, KV_HEADS, HEAD_DIM), np.int8) for name in ("k_cache", "v_cache")},
        r"^k_cache: expected float32.*got int8",
    ),
    "a value head size of its own": (
        {"v_cache": np.zeros((BLOCKS, PAGE, KV_HEADS, 32), np.float32)},
        r"^v_cache: expected shape .* = 64\], got \(48, 16, 2, 32\)",
    ),
    "pages of 12 tokens": (
        {name: np.zeros((BLOCKS, 12, KV_HEADS, HEAD_DIM), np.float32) for name in ("k_cache", "v_cache")},
        r"^k_cache: expected a page_block_size that is a multiple of 8, got 12",
    ),
    "room for 12 tokens": (
        {
            **{name: np.zeros((ROWS, 12, KV_HEADS, HEAD_DIM), np.float32) for name in ("k_cache", "v_cache")},
            "block_table": None,
            "cache_seqlens": 12,
        },
        r"^k_cache: expected room for a multiple of 8 tokens where there is no block_table, got 12; make",
    ),
    "fewer rows than queries": (
        {
            **{name: np.zeros((3, 64, KV_HEADS, HEAD_DIM), np.float32) for name in ("k_cache", "v_cache")},
            "block_table": None,
        },
        r"^cache_batch_idx: expected one of the 3 rows of k_cache for each of the 5 rows of q",
    ),
    "an index of no row": (
        {"block_table": None, "cache_seqlens": 8, "cache_batch_idx": [0, 1, 2, 3, BLOCKS]},
        r"^cache_batch_idx: expected one of the 48 rows of k_cache .*got \[0, 1, 2, 3, 48\]",
    ),
    "an index below 0": (
        {"block_table": None, "cache_seqlens": 8, "cache_batch_idx": [0, 1, 2, 3, -1]},
        r"^cache_batch_idx: expected one of the 48 rows of k_cache .*got \[0, 1, 2, 3, -1\]",
    ),
    "indices beside a table": (
        {"cache_batch_idx": np.arange(ROWS)},
        r"^cache_batch_idx: expected None with a block_table; reorder the rows",
    ),
    "a table of other rows": ({"block_table": table(2)[:3]}, r"^block_table: expected integers of shape \[5, max_bl"),
    "a table of floats": ({"block_table": table(2) * 1.0}, r"^block_table: expected integers .*got float64"),
    "a block below 0": (
        {"block_table": np.where(table(2) == table(2)[2, 3], -1, table(2))},
        r"^block_table: expected page ids in .*, got block_table\[2, 3\] = -1",
    ),
    "a block past the cache": (
        {"block_table": np.where(table(2) == table(2)[2, 3], BLOCKS, table(2))},
        r"^block_table: expected block ids below 48, which is what k_cache has, got 48",
    ),
    "lengths of other rows": ({"cache_seqlens": [1, 2]}, r"^cache_seqlens: expected an integer, or one for each of"),
    "a length of floats": ({"cache_seqlens": 3.0}, r"^cache_seqlens: expected an integer.*got float64"),
    "a length past the table": (
        {"cache_seqlens": [64, 64, 65, 64, 64]},
        r"^cache_seqlens: expected lengths in \[0, 64\], .*got cache_seqlens\[2\] = 65",
    ),
    "a length below 0": ({"cache_seqlens": -1}, r"^cache_seqlens: expected lengths in \[0, 64\], .* = -1$"),
    "keys to the right": ({"window_size": (8, 2)}, r"^window_size: expected -1 or 0 on the right, got 2; pass causal="),
    "a window that is none": ({"window_size": (1.5, 0)}, r"^window_size: expected an integer of at least -1, got 1\.5"),
    "two windows": (
        {"window_size": (8, 0), "attention_chunk": 16},
        r"^attention_chunk: expected 0 beside window_size = \(8, 0\), got 16; pass one of them",
    ),
    "a chunk without end": (
        {"attention_chunk": 2**30}, r"^attention_chunk: expected an integer of at least 0 and below 1073741823"
    ),
    "a factor that is no number": (
        {"k_descale": "a"} | {name: x.astype("float8_e4m3fn") for name, x in arrays()._asdict().items() if name != "q"},
        r"^k_descale: expected a number, or one for each row and kv head \(5, 2\), got 'a'",
    ),
    **{
        f"{kind} that is not finite": (
            {name: x.astype("float8_e4m3fn") for name, x in arrays()._asdict().items() if name != "q"}
            | {"v_descale": factor},
            r"^v_descale: expected finite factors, got .*(nan|inf)",
        )
        for kind, factor in (("a factor", np.nan), ("an array", np.full((5, 2), np.inf)), ("a list", [[1, np.nan]] * 5))
    },
    "factors of rows of several lengths": (
        {"q_descale": [[1], [1, 2]]}, r"^q_descale: expected rows of one length, got rows of several"
    ),
    "several tokens that see all keys to the right": (
        {"q": np.zeros((ROWS, 2, HEADS, HEAD_DIM), np.float32), "window_size": (8, -1)},
        r"^window_size: expected no bound on the left without causal, got \(8, -1\); pass causal=True",
    ),
    "several tokens that see their chunk to its end": (
        {"q": np.zeros((ROWS, 2, HEADS, HEAD_DIM), np.float32), "attention_chunk": 8},
        r"^attention_chunk: expected no bound on the left without causal, got 8; pass causal=True",
    ),
    "a cap below 0": ({"softcap": -1.0}, r"^softcap: expected a positive number or None, got -1\.0"),
    "sinks of other heads": ({"sinks": np.zeros(3, np.float32)}, r"^sinks: expected shape \[nheads = 4\], got \(3,\)"),
    "a scale that is not finite": ({"softmax_scale": np.inf}, r"^softmax_scale: expected a finite number, got inf"),
    "an unknown implementation": (
        {"implementation": "cuda"},
        r"^implementation: expected 'mosaic', 'ampere', 'xla'.* or None",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused_by_name(case: str) -> None:
    changes, message = WRONG[case]
    arguments = {**arrays()._asdict(), "block_table": table(2), "cache_seqlens": ROOM, **changes}
    with pytest.raises(ValueError, match=message):
        flash_attn_with_kvcache(**arguments)


def test_a_refused_table_leaves_the_plans_as_they_were() -> None:
    given, rows = arrays(), Rows(table(2), np.full(ROWS, 50))
    assert_attends(given, rows)
    before = plans.info()
    with pytest.raises(ValueError, match=r"^block_table: "):
        flash_attn_with_kvcache(*given, block_table=rows.block_table + BLOCKS, cache_seqlens=50)
    assert plans.info() == before
