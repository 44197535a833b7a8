"""A decoder that is divided among devices says what the whole one says, and each device has its part and no more."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CONTEXT, DOCUMENT, LONG, PAGE_SIZE, PROMPTS, QUESTIONS, VOCAB, Dense, assert_logits_follow, numbered
from engines import assert_alone, assert_no_page_leaked, greedy, make_engine, run
from flax import nnx
from jax.sharding import AxisType, Mesh
from small_checkpoints import LLAMA, QWEN2, QWEN3, TOKENS, exact_logits, tensors_of, write

from codec_jax.nnx import (
    PUBLISHED,
    Decoder,
    DecoderConfig,
    Engine,
    Latent,
    PlacedDecoder,
    Sampler,
    SamplingParams,
    open_checkpoint,
    parallel,
    random_decoder,
)
from codec_jax.nnx.memory import pages_that_fit
from codec_jax.nnx.parallel import Parallel

PAGES = 96
CONFIG = DecoderConfig(
    VOCAB, 32, 48, num_layers=1, num_q_heads=8, num_kv_heads=2, head_dim=8, tied_embeddings=False,
    dtype=jnp.float32, param_dtype=jnp.float32,
)  # fmt: skip
#: Devices along context and tensor. With more than 2 along tensor, several have the same kv head.
MESHES = [(1, 8), (2, 4), (4, 2), (8, 1)]


def mesh_of(context: int, tensor: int) -> Mesh:
    """Axes of one device are left out, but for one of them, and every other mesh has explicit axes."""
    axes = {"context": context, "tensor": tensor} if context == tensor else {}
    axes |= {name: size for name, size in (("context", context), ("tensor", tensor)) if size > 1}
    kind = AxisType.Explicit if context in (2, 8) else AxisType.Auto
    devices = jax.devices("cpu")[: context * tensor]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes), devices=devices)


def sharp(seed: int) -> Decoder:
    """Weights with sharp attention and texts that do not repeat."""
    graph, weights = nnx.split(nnx.eval_shape(lambda: Decoder(CONFIG, nnx.Rngs(0))))
    rng = np.random.default_rng(seed)
    weights = jax.tree.map(
        lambda x: jnp.asarray(1.0 + (x.ndim > 1) * (rng.normal(size=x.shape) * 2 * x.shape[0] ** -0.5 - 1.0), x.dtype),
        weights,
    )
    return nnx.merge(graph, weights)


@pytest.fixture(scope="module")
def whole() -> Dense:
    return Dense(sharp(0))


@pytest.fixture(scope="module", params=MESHES, ids=lambda sizes: f"{sizes[0]}x{sizes[1]}")
def sizes(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param


@pytest.fixture(scope="module")
def shared(whole: Dense, sizes: tuple[int, int]) -> Iterator[Engine]:
    """Of 4 x 2 devices each computes a part of the columns of its group, as with weights too large to be repeated."""
    with pytest.MonkeyPatch.context() as patch:
        if sizes == (4, 2):
            patch.setattr(parallel, "_BYTES_OF_A_GATHER", 0)
        yield make_engine(whole.model, mesh=mesh_of(*sizes), num_pages=PAGES, max_requests=4, prefill_tokens=128)


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    yield shared
    assert_no_page_leaked(shared)


# --- Decoding ----------------------------------------------------------------------------------------------------


def test_an_engine_says_what_the_whole_decoder_says(engine: Engine, whole: Dense, compilations: list[str]) -> None:
    requests = [engine.submit(prompt, greedy(10 if prompt is LONG else 20)) for prompt in [LONG, *PROMPTS, DOCUMENT]]
    while len(requests[1].tokens) < 9:
        engine.step()
    requests += [engine.fork(requests[1], greedy(30)), engine.submit([*PROMPTS[0], 3], greedy(12))]
    engine.abort(requests[2])
    run(engine)
    [scores] = engine.score([PROMPTS[0]], [QUESTIONS[0]])
    engine.generate([PROMPTS[0]], SamplingParams(max_tokens=3, presence_penalty=0.5))
    assert not compilations
    np.testing.assert_allclose(scores, whole.logprobs(PROMPTS[0], QUESTIONS[0]), atol=1e-4)
    for request in requests:
        assert request.finish_reason == ("abort" if request is requests[2] else "length")
        assert_alone(request, whole)
        np.testing.assert_allclose(request.logprobs, whole.logprobs(request.prompt.tolist(), request.tokens), atol=1e-4)


def test_each_device_has_its_part_of_the_pages(engine: Engine, sizes: tuple[int, int]) -> None:
    context, tensor = sizes
    for pages in jax.tree.leaves(engine._device._pages):
        shapes = {shard.device: shard.data.shape for shard in pages.addressable_shards}
        assert len(shapes) == context * tensor
        assert set(shapes.values()) == {(PAGES // context, PAGE_SIZE, max(2 // tensor, 1), 8)}


def test_an_engine_takes_other_weights(engine: Engine, whole: Dense, compilations: list[str]) -> None:
    other = Dense(sharp(1))
    compilations.clear()
    engine.update_weights(other.model)
    [request] = engine.generate([PROMPTS[0]], greedy(8))
    engine.update_weights(whole.model)
    assert not compilations
    assert_alone(request, other)


def test_a_sampler_says_what_the_whole_decoder_says(whole: Dense) -> None:
    sampler = Sampler(
        whole.model, mesh=mesh_of(2, 4), max_requests=6, num_pages=64, page_size=8, max_context=CONTEXT, steps=8
    )
    state, texts = sampler.start(PROMPTS), numbered(PROMPTS)
    assert_logits_follow(state, texts, whole)

    def decode(count: int) -> None:
        nonlocal state
        state, generated = sampler.decode(state, count, temperature=0.0)
        for request, text in texts.items():
            assert generated.tokens[request] == whole.greedy(text, count)
            text += generated.tokens[request]
        assert_logits_follow(state, texts, whole)

    decode(12)
    state, [fork] = sampler.fork(state, [1])
    texts[fork] = [*texts[1], *QUESTIONS[0]]
    state = sampler.append(state, {fork: QUESTIONS[0]})
    state = sampler.prune(state, [2])
    del texts[2]
    decode(5)
    assert sum(homes := np.bincount(state.pool.homes.of(state.forest.used_pages), minlength=2)) > 12
    assert homes.min() > 0


PROCESS = f"""
import sys, jax, jax.numpy as jnp
from flax import nnx
from codec_jax.nnx import Decoder, DecoderConfig, Engine, SamplingParams
address, count, number = sys.argv[1], *map(int, sys.argv[2:])
jax.config.update("jax_num_cpu_devices", 4 // count)
jax.distributed.initialize(address, count, number)
config = DecoderConfig({VOCAB}, 32, 48, 1, 8, 2, 8, dtype=jnp.float32, param_dtype=jnp.float32)
engine = Engine(
    Decoder(config, nnx.Rngs(0)), mesh=jax.make_mesh((2, 2), ("context", "tensor")), max_requests=2, num_pages=32,
    page_size=8, max_context={CONTEXT}, prefill_tokens=128,
)
requests = engine.generate({PROMPTS[:2]}, SamplingParams(max_tokens=9, temperature=0.0))
print([request.tokens for request in requests])
"""


def test_several_processes_say_what_one_says() -> None:
    count = 2  # of two devices each: one axis is within a process, one between them
    config = replace(CONFIG, tied_embeddings=True)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, address, str(count), str(number)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    dense = Dense(Decoder(config, nnx.Rngs(0)))
    want = [dense.greedy(prompt, 9) for prompt in PROMPTS[:2]]
    for process in processes:
        assert process.communicate(timeout=300)[0].splitlines()[-1] == str(want)


# --- Weights -----------------------------------------------------------------------------------------------------


NORMS = {
    "norm.scale": "model.norm",
    "attention_norm.scale": "input_layernorm",
    "mlp_norm.scale": "post_attention_layernorm",
    "query_norm.scale": "self_attn.q_norm",
    "key_norm.scale": "self_attn.k_norm",
}


def block_of(
    tensors: dict[str, np.ndarray], path: str, c: int, t: int, context: int, tensor: int, repeated: bool
) -> np.ndarray:
    """What device (c, t) is to have of a parameter, from the definition."""
    if repeated and "query_key_value" in path:
        c, context = 0, 1  # as if it were alone in its group
    number, devices = t * context + c, tensor * context

    def rows(name: str) -> np.ndarray:
        return np.split(tensors[name], devices)[number]

    def kv(name: str) -> np.ndarray:
        heads = tensors[name].reshape(2, 16, -1)  # kv heads
        of_group = np.split(np.repeat(heads, max(tensor // 2, 1), axis=0), tensor)[t]
        return np.split(of_group.reshape(-1, heads.shape[-1]), context)[c]

    layer = f"model.layers.{path.split('.')[1]}." if path.startswith("blocks") else ""
    name = ".".join(path.split(".")[-2:])
    match name:
        case "embedding.embedding":
            return rows("model.embed_tokens.weight")
        case "head.kernel":
            return rows("lm_head.weight").T
        case "query_key_value.kernel":
            attention = f"{layer}self_attn."
            parts = rows(f"{attention}q_proj.weight"), kv(f"{attention}k_proj.weight"), kv(f"{attention}v_proj.weight")
            return np.concatenate(parts).T
        case "query_key_value.bias":
            attention = f"{layer}self_attn."
            parts = rows(f"{attention}q_proj.bias"), kv(f"{attention}k_proj.bias"), kv(f"{attention}v_proj.bias")
            return np.concatenate([part.reshape(-1) for part in parts])
        case "gate_up.kernel":
            return np.concatenate([rows(f"{layer}mlp.gate_proj.weight"), rows(f"{layer}mlp.up_proj.weight")]).T
        case "out.kernel":
            return np.split(tensors[f"{layer}self_attn.o_proj.weight"].T, devices)[number]
        case "down.kernel":
            return np.split(tensors[f"{layer}mlp.down_proj.weight"].T, devices)[number]
    return tensors[f"{layer}{NORMS[name]}.weight"]


@pytest.mark.parametrize(
    ("context", "tensor", "repeated"),
    [(1, 1, True), (2, 2, True), (2, 2, False), (1, 4, True), (4, 1, True), (4, 1, False)],
)
@pytest.mark.parametrize("config", [QWEN3, LLAMA, QWEN2], ids=["tied", "untied", "biases"])
def test_a_checkpoint_is_read_to_the_devices_that_keep_it(
    tmp_path: Path, config: dict, context: int, tensor: int, repeated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not repeated:
        monkeypatch.setattr(parallel, "_BYTES_OF_A_GATHER", 0)
    tensors, mesh = tensors_of(config), mesh_of(context, tensor)
    checkpoint = open_checkpoint(write(tmp_path, config, tensors, shards=2))
    loaded = checkpoint.load(jnp.float32, mesh=mesh)
    placed = PlacedDecoder.of(checkpoint.load(jnp.float32), mesh)
    sizes: dict[Any, list[int]] = {device: [] for device in mesh.devices.flat}
    for (path, array), (_, same) in zip(
        nnx.to_flat_state(loaded.weights), nnx.to_flat_state(placed.weights), strict=True
    ):
        name = ".".join(map(str, path))
        for shard, other in zip(array[...].addressable_shards, same[...].addressable_shards, strict=True):
            t, c = divmod(list(mesh.devices.reshape(context, tensor).T.flat).index(shard.device), context)
            np.testing.assert_array_equal(shard.data, block_of(tensors, name, c, t, context, tensor, repeated))
            np.testing.assert_array_equal(shard.data, other.data)
            sizes[shard.device].append(shard.data.size if shard.data.ndim > 1 else 0)
    matrices = sum(tensor.size for tensor in tensors.values() if tensor.ndim > 1)
    more = max(tensor // 2 - 1, 0) * 2 * 2 * 2 * 16 * 32  # k and v of two layers, once more for each kv head
    if repeated:
        columns = sum(
            x.size
            for name, x in tensors.items()
            if x.ndim > 1 and name.split(".")[-2] in ("q_proj", "k_proj", "v_proj")
        )
        more = more * context + columns * (context - 1)
    assert {sum(parts) for parts in sizes.values()} == {(matrices + more) // (context * tensor)}
    assert placed.updated(loaded).weights is loaded.weights


def test_a_checkpoint_decodes_where_it_was_read_to(tmp_path: Path) -> None:
    tensors, mesh = tensors_of(QWEN3), mesh_of(2, 2)
    checkpoint = open_checkpoint(write(tmp_path, QWEN3, tensors))
    sampler = Sampler(checkpoint.load(jnp.float32, mesh=mesh), max_requests=2, num_pages=32, page_size=8)
    state = sampler.start(TOKENS)
    want = [exact_logits(tensors, QWEN3, tokens)[-1] for tokens in TOKENS]
    np.testing.assert_allclose(state.logits, want, atol=2e-4)
    sampler.update_weights(checkpoint.load(jnp.float32))
    with pytest.raises(ValueError, match=r"^model: expected one that is whole, or placed on Mesh"):
        sampler.update_weights(checkpoint.load(jnp.float32, mesh=mesh_of(1, 4)))
    with pytest.raises(ValueError, match=r"^mesh: expected .*leave it out"):
        Engine(checkpoint.load(jnp.float32, mesh=mesh), mesh=mesh_of(1, 4), num_pages=32)


# --- Sizes -------------------------------------------------------------------------------------------------------


def test_random_weights_are_drawn_to_the_devices_that_keep_them() -> None:
    mesh = mesh_of(2, 2)
    drawn, want = random_decoder(CONFIG, seed=3, mesh=mesh), PlacedDecoder.of(random_decoder(CONFIG, seed=3), mesh)
    assert jax.tree.all(
        jax.tree.map(lambda a, b: a.sharding == b.sharding and (a == b).all(), drawn.weights, want.weights)
    )
    assert drawn.kinds == want.kinds


@pytest.mark.parametrize(
    ("context", "tensor", "changes", "message"),
    [
        (2, 2, {"num_q_heads": 6}, r"^mesh: expected 2 x 2 devices such that 4 divides num_q_heads = 6, got"),
        (2, 2, {"mlp_size": 46}, r"^mesh: .* 4 divides mlp_size = 46, got a remainder of 2; use fewer devices"),
        (1, 4, {"vocab_size": 50}, r"^mesh: .* 4 divides vocab_size = 50"),
        (1, 2, {"num_kv_heads": 1, "num_q_heads": 7}, r"^mesh: .* 2 divides num_q_heads = 7"),
        (1, 4, {"num_kv_heads": 6, "num_q_heads": 12}, r"^mesh: expected an axis 'tensor' that divides the 6 kv heads"),
        (8, 1, {"num_kv_heads": 2, "head_dim": 2}, r"^mesh: .* 8 divides columns of the kv heads of a group = 4"),
    ],
)
def test_what_devices_do_not_divide_is_refused(
    context: int, tensor: int, changes: dict, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "_BYTES_OF_A_GATHER", 0)
    model = Decoder(replace(CONFIG, **changes), nnx.Rngs(0))
    for make in (Engine, Sampler):
        with pytest.raises(ValueError, match=message):
            make(model, mesh=mesh_of(context, tensor), max_requests=2, num_pages=32)


def test_meshes_and_pools_that_do_not_fit_are_refused(whole: Dense) -> None:
    sizes = {"max_requests": 2, "num_pages": 32}
    with pytest.raises(ValueError, match=r"^mesh: expected axes of 'context', 'tensor' only, got 'data'"):
        Engine(whole.model, mesh=jax.make_mesh((2,), ("data",), devices=jax.devices("cpu")[:2]), **sizes)
    with pytest.raises(TypeError, match=r"^mesh: expected a Mesh, got int"):
        Sampler(whole.model, mesh=2, **sizes)
    with pytest.raises(TypeError, match=r"^mesh: expected a Mesh, got AbstractMesh"):
        Engine(whole.model, mesh=mesh_of(2, 4).abstract_mesh, **sizes)
    for make in (Engine, Sampler):
        with pytest.raises(ValueError, match=r"^num_pages: expected as many pages on each of 4 devices, got 33"):
            make(whole.model, mesh=mesh_of(4, 2), **sizes | {"num_pages": 33})


def test_pages_that_fit_are_those_of_all_devices() -> None:
    alone = pages_that_fit(CONFIG, 16, gib=1.0)
    assert [pages_that_fit(CONFIG, 16, gib=1.0, mesh=mesh_of(*sizes)) / alone for sizes in MESHES] == [2, 4, 8, 8]


def test_columns_are_computed_by_all_of_a_group_where_their_weights_are_few() -> None:
    config, megabytes = PUBLISHED["qwen3-32b"], 5120 * (64 + 2 * 8) * 128 * 2 / 1e6  # of a layer: 104.9
    more = {
        (context, tensor): parallel.repeated_bytes(config, Parallel(tensor, context)) / 1e6
        for context, tensor in ((1, 1), (1, 8), (2, 1), (4, 1), (4, 2))
    }
    assert more == pytest.approx(
        {(1, 1): 0, (1, 8): 0, (2, 1): megabytes / 2, (4, 1): 0, (4, 2): megabytes / 2 * 3 / 4}
    )
    latent = Latent(size=24, nope_dim=16, rope_dim=8, value_dim=16)  # whose queries are gathered as they are
    of_latents = DecoderConfig(64, 32, 64, 1, 4, num_kv_heads=1, head_dim=32, qk_norm=False, latent=latent)
    assert parallel.repeated_bytes(of_latents, Parallel(context=2)) == 0
