"""Decoders that exchange through mailboxes: what goes through them, and that it is the same as by collectives.

Where there are no GPUs collectives take the place of the kernels, which have tests of their own.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CONTEXT, PROMPTS, VOCAB, Dense, assert_logits_follow, numbered
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh
from norm_calls import add_and_norm, summed, with_random_biases, with_random_norms
from test_head_split import split_heads

from codec_jax.attention import backends
from codec_jax.attention.exchange import merge_heads
from codec_jax.attention.xla import XLA
from codec_jax.nnx import (
    Decoder,
    DecoderConfig,
    Mixture,
    PlacedDecoder,
    Sampler,
    expert_products,
    head_split,
    mailboxes,
    parallel,
    parts,
)
from codec_jax.nnx.engine import Engine
from codec_jax.nnx.mailboxes import Mailbox
from codec_jax.nnx.parallel import Parallel
from codec_jax.nnx.params import SamplingParams
from pallas_kernels.addends import Parts, Shares
from pallas_kernels.between_devices.sizes import Sizes, of_arrays, of_columns, of_heads, of_merges, of_rows
from pallas_kernels.hopper import head_rows
from pallas_kernels.hopper.head_rows import HeadSizes, Norm, Places

CONFIG = DecoderConfig(
    VOCAB, 32, 48, num_layers=2, num_q_heads=8, num_kv_heads=2, head_dim=64, dtype=jnp.float32, param_dtype=jnp.float32,
)  # fmt: skip
WHOLE = Dense(Decoder(CONFIG, nnx.Rngs(0)))


def mesh_of(context: int, tensor: int) -> Mesh:
    devices = jax.devices("cpu")[: context * tensor]
    return jax.make_mesh((context, tensor), ("context", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=devices)


class Collectives(Mailbox):
    """A mailbox that collectives take the place of, and that counts what goes through it."""

    counts: Counter[str]

    def count(self, kind: str, exchange: Callable[..., Any], *arrays: Any) -> Any:
        assert self.takes(arrays[0])
        self.counts[kind] += 1
        return exchange(*arrays)

    def add_up(self, x: Any) -> Any:
        axes = tuple(axis for axis in ("tensor", "context") if lax.axis_size(axis) > 1)
        return self.count("sums", lambda x: lax.psum(x, axes), x)

    def add_up_and_norm(self, x: Any, given: Any, factors: Any, norm: Norm) -> Any:
        assert self.is_by_rows
        axes = tuple(axis for axis in ("tensor", "context") if lax.axis_size(axis) > 1)
        share = summed(given).astype(x.dtype).reshape(self.like[0])
        update = self.count("sums with norms", lambda share: lax.psum(share, axes), share)
        return add_and_norm(x, update.reshape(x.shape), factors, norm)

    def collect(self, x: Any, parts: Sequence[int]) -> Any:
        def joined(x: Any) -> Any:
            own = jnp.split(x, np.cumsum(parts)[:-1].tolist(), axis=2)
            return jnp.concatenate([lax.all_gather(y, "context", axis=2, tiled=True, to="invarying") for y in own], 2)

        return self.count("gathers", joined, x)

    def split_heads(self, columns: Any, scales: Any, places: Places, heads: HeadSizes) -> Any:
        own = heads.share(lax.axis_size("context"))

        def joined(x: Any) -> Any:
            of_parts = jnp.split(x, np.cumsum([own.num_q_heads, own.num_kv_heads]).tolist(), axis=2)
            gathered = [lax.all_gather(y, "context", axis=2, tiled=True, to="invarying") for y in of_parts]
            return jnp.concatenate(gathered, 2).reshape(1, columns.parts.shape[1], -1)

        own_heads = summed(columns).reshape(self.like[0]).astype(self.like[1])
        return split_heads(Parts(self.count("heads", joined, own_heads)), scales, places, heads)

    def attend(self, family: Any, call: Any, scores: Any) -> Any:
        def merged(_: Any) -> Any:
            return merge_heads(*family.attend(call, scores), "context")

        return self.count("merges", merged, call.query)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Exchanges in the layers of each program that is traced."""
    counted = Counter[str]()

    def open_one(seed: Any, like: Any, sizes: Sizes | None, *, is_by_rows: bool = False) -> Mailbox | None:
        assert (seed.shape, seed.dtype) == ((), jnp.int32)
        memory = (None, jax.new_ref(np.zeros(1, np.int32)))
        return sizes and Collectives((like.shape, like.dtype), sizes, memory, is_by_rows)

    monkeypatch.setattr(Collectives, "counts", counted, raising=False)
    monkeypatch.setattr(Mailbox, "_open", staticmethod(open_one))
    monkeypatch.setattr(mailboxes, "why_not", lambda _: None)
    monkeypatch.setattr(backends, "BACKENDS", (XLA._replace(attend_and_merge=lambda *_: None),))
    return counted


def check_two_tokens(sampler: Sampler, counts: Counter[str], whole: Dense = WHOLE) -> None:
    """Decode twice, and count the exchanges of that."""
    state, texts = sampler.start(PROMPTS), numbered(PROMPTS)
    counts.clear()
    state, generated = sampler.decode(state, 2, temperature=0.0)
    for request, tokens in enumerate(generated.tokens):
        texts[request] += tokens
    assert_logits_follow(state, texts, whole)


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize(("context", "tensor", "gathers"), [(1, 2, False), (2, 2, True)], ids=["1x2", "2x2"])
def test_layers_exchange_through_mailboxes(
    context: int, tensor: int, gathers: bool, by_rows: bool, counts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if gathers:
        monkeypatch.setattr(parallel, "_BYTES_OF_A_KERNEL", 0)
    if by_rows:  # as hidden states of 16 bits are, which would hide mistakes here
        monkeypatch.setattr(mailboxes, "of_rows", of_arrays)
        monkeypatch.setattr(parts, "number_of_parts", lambda depth, *_: 2)
    placed = PlacedDecoder.of(WHOLE.model, mesh_of(context, tensor))
    steps = 3 if by_rows else 2  # a program of its own
    sampler = Sampler(placed, max_requests=4, num_pages=64, page_size=8, max_context=CONTEXT, steps=steps)
    check_two_tokens(sampler, counts)
    layers = CONFIG.num_layers
    merges = layers if context > 1 else 0
    sums = {"sums with norms" if by_rows else "sums": 2 * layers}
    assert counts == Counter(merges=merges, gathers=merges if gathers else 0) + Counter(sums)


@pytest.mark.parametrize("placement", ["both", "after"])
def test_norms_on_the_way_out_of_a_layer_come_between_the_sum_and_the_hidden_states(
    placement: Any, counts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailboxes, "of_rows", of_arrays)
    whole = Dense(
        with_random_norms(Decoder(replace(CONFIG, norm_placement=placement, norm_plus_one=True), nnx.Rngs(1)))
    )
    placed = PlacedDecoder.of(whole.model, mesh_of(1, 2))
    sampler = Sampler(placed, max_requests=4, num_pages=64, page_size=8, max_context=CONTEXT, steps=2)
    check_two_tokens(sampler, counts, whole)
    assert counts == Counter({"sums with norms": 2 * CONFIG.num_layers})


@pytest.mark.parametrize("context", [1, 2])
def test_what_experts_made_and_biases_are_exchanged_once(
    context: int, counts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailboxes, "of_rows", of_arrays)
    monkeypatch.setattr(parts, "number_of_parts", lambda *_: 2)
    monkeypatch.setattr(expert_products, "_TILE_ROWS", 1)  # so that so few tokens have rows of their own
    given, add_up_and_norm = [], Collectives.add_up_and_norm

    def noted(self: Collectives, x: Any, update: Any, *rest: Any) -> Any:
        given.append(
            "experts" if isinstance(update, Shares) else "parts with a bias" if update.bias is not None else ""
        )
        return add_up_and_norm(self, x, update, *rest)

    monkeypatch.setattr(Collectives, "add_up_and_norm", noted)
    mixture = Mixture(num_experts=32, experts_per_token=2, expert_size=32, bias=True)
    config = replace(CONFIG, mixture=mixture, qkv_bias=True, out_bias=True)
    whole = Dense(with_random_biases(Decoder(config, nnx.Rngs(2))))
    placed = PlacedDecoder.of(whole.model, mesh_of(context, 2))
    sampler = Sampler(placed, max_requests=4, num_pages=64, page_size=8, max_context=CONTEXT, steps=2)
    given.clear()
    check_two_tokens(sampler, counts, whole)
    assert counts["sums with norms"] == 2 * CONFIG.num_layers
    assert given[-2 * CONFIG.num_layers :] == ["parts with a bias", "experts"] * CONFIG.num_layers


@pytest.mark.parametrize(("tensor", "parts_of_each"), [(1, 1), (1, 2), (2, 2)])
def test_heads_that_are_whole_are_collected_while_they_are_split(
    tensor: int, parts_of_each: int, counts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And columns are, where two groups have a kv head each, of which every device computes a half."""

    def of_float32(rows: int, num_own_heads: int, head_dim: int, dtype: Any, *group: int) -> Sizes | None:
        assert dtype == jnp.float32  # in which nothing but a mistake makes a difference
        return of_heads(rows, num_own_heads, head_dim, jnp.bfloat16, *group)

    monkeypatch.setattr(parallel, "_BYTES_OF_A_KERNEL", 0)
    for module in (parallel, head_split):
        monkeypatch.setattr(module, "takes_heads", lambda *_: True)
    monkeypatch.setattr(head_rows, "split_heads", split_heads)
    monkeypatch.setattr(mailboxes, "of_heads", of_float32)
    monkeypatch.setattr(mailboxes, "of_rows", of_arrays)
    monkeypatch.setattr(parts, "number_of_parts", lambda *_: parts_of_each)
    sampler = Sampler(
        PlacedDecoder.of(WHOLE.model, mesh_of(2, tensor)),
        max_requests=4, num_pages=64, page_size=8, max_context=CONTEXT, steps=2 + parts_of_each,  # a program each
    )  # fmt: skip
    check_two_tokens(sampler, counts)
    layers = CONFIG.num_layers
    collected = {"heads" if tensor == 1 else "gathers": layers}
    assert counts == Counter({"merges": layers, "sums with norms": 2 * layers} | collected)


def test_batches_of_a_step_merge_through_mailboxes_of_their_own(
    counts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk of a prompt beside requests that decode: rows of two plans, which POR has in tiles of their own."""
    steps: list[list[tuple[int, ...]]] = []
    with_mailboxes = Parallel._with_mailboxes

    def counted(self: Parallel, token: Any, x: Any, config: DecoderConfig, batches: list[tuple[int, ...]]) -> Parallel:
        opened = with_mailboxes(self, token, x, config, batches)
        steps.append([mailbox.like[0] for mailbox in opened.merges])
        return opened

    monkeypatch.setattr(Parallel, "_with_mailboxes", counted)
    engine = Engine(
        WHOLE.model, mesh=mesh_of(2, 1), max_requests=2, num_pages=64, page_size=8, max_context=CONTEXT,
        prefill_tokens=32, steps=2,
    )  # fmt: skip
    first = engine.submit(PROMPTS[0], SamplingParams(max_tokens=12, temperature=0.0))
    while not first.tokens:
        engine.step()
    second = engine.submit(PROMPTS[1], SamplingParams(max_tokens=5, temperature=0.0))
    while not engine.idle:
        engine.step()
    assert first.tokens == WHOLE.greedy(PROMPTS[0], 12)
    assert second.tokens == WHOLE.greedy(PROMPTS[1], 5)
    assert counts["merges"] == CONFIG.num_layers * sum(map(len, steps))  # none went another way
    assert any(len(set(shapes)) == 2 for shapes in steps)


def test_gpus_that_have_none_are_told_of_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(platform="gpu", compute_capability="8.0", device_kind="NVIDIA A100", id=0)
    of_two, of_one = (
        SimpleNamespace(devices=np.asarray([device] * count), size=count, axis_names=("tensor",)) for count in (2, 1)
    )
    with pytest.warns(UserWarning, match=r"mesh: .*collectives.*needs a Hopper GPU"):
        assert mailboxes.stride_of(of_two) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert mailboxes.stride_of(of_one) is None  # exchanges nothing
        assert mailboxes.stride_of(mesh_of(2, 1)) is None  # of CPUs


def test_the_way_along_context_is_as_the_mesh_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailboxes, "why_not", lambda _: None)
    assert mailboxes.stride_of(mesh_of(2, 4)) == 4
    devices = np.asarray(jax.devices("cpu"))
    assert mailboxes.stride_of(Mesh(devices.reshape(4, 2), ("tensor", "context"))) == 1
    assert mailboxes.stride_of(Mesh(devices, ("context",))) == 1


def test_sizes_by_hand() -> None:
    hidden = jax.ShapeDtypeStruct((16, 1, 2560), jnp.bfloat16)
    assert of_arrays(hidden, 2) == Sizes(2, 20480, width=4)
    assert of_arrays(hidden, 2).blocks == 40
    # A thread has 4 words, which are 8 numbers.
    assert of_columns(hidden, [2048, 504, 8], 2) == Sizes(2, 20480, width=4)
    assert of_columns(hidden, [2048, 508, 4], 2) is None
    # A thread block has a row of 1,280 words, of which a thread sends 2 at a time, five times.
    sizes = of_rows(hidden, 2)
    assert sizes == Sizes(2, 20480, width=2, chunks=5)
    assert sizes.blocks == 16
    # 5 times 4 rows of 12 heads, a thread of which has 2 words: 4 numbers of a head of 128.
    sizes = of_heads(17, 12, 128, jnp.bfloat16, 2, 4)
    assert sizes == Sizes(2, 5 * 12 * 256, width=2, stride=4)
    assert sizes.blocks == 60
    assert [of_heads(16, 12, head_dim, jnp.float16, 2).width for head_dim in (64, 256)] == [1, 4]
    # 11.25 words a thread; 64; 265 thread blocks; and 5.2 MB to the other device.
    for shape in (16, 1, 2880), (16, 1, 16_384), (265, 1, 512), (256, 1, 10_240):
        assert of_rows(jax.ShapeDtypeStruct(shape, jnp.bfloat16), 2) is None
    assert of_rows(jax.ShapeDtypeStruct((16, 1, 2560), jnp.float32), 2) is None
    # 1,280 thread blocks with four words a thread would be too many: half as many, with two times four.
    many = jax.ShapeDtypeStruct((256, 1, 5120), jnp.bfloat16)
    assert of_arrays(many, 2) == Sizes(2, 256 * 2560, width=4, chunks=2)
    assert of_rows(many, 2) == Sizes(2, 256 * 2560, width=4, chunks=5)
    out = jax.ShapeDtypeStruct((16, 1, 32, 128), jnp.bfloat16)
    # 16 rows of 32 heads, 64 words each, of which a thread of a warp has two; two words beside for each row. A thread
    # block has four rows. The last tile of 8 kv heads is the first: 16 requests have 64 rows of each.
    sizes = of_merges(out, 8, 128, 4, 2)
    assert sizes == Sizes(4, 16 * 32 * 64, width=2, sharing=32, stride=2, to_one=True)
    assert sizes.blocks == 16 * 32 // 4
    assert sizes.slot == 16 * 32 * (64 + 2)
    assert sizes.sent_bytes == 3 * 4 * 16 * 8 * (64 + 2)  # all but this device's own heads
    # Of 3 x 2 rows of one kv head one tile of 64, two rows a thread block, 256 numbers a row: two of a thread, twice.
    sizes = of_merges(jax.ShapeDtypeStruct((3, 2, 8, 256), jnp.bfloat16), 1, 256, 2)
    assert sizes == Sizes(2, 64 * 128, width=1, chunks=2, sharing=64, to_one=True)
    # Two warps for a row of 64 numbers would have half a word a thread: one warp, and 4 rows a thread block.
    sizes = of_merges(jax.ShapeDtypeStruct((1, 1, 8, 64), jnp.bfloat16), 2, 64, 2)
    assert (sizes.width, sizes.sharing, sizes.blocks) == (1, 32, 2 * 64 // 4)
