"""A decoder's weights on the devices that read them, and programs that run there.

_DIVIDED        how each parameter is cut into the blocks of S devices, by the numbers of `Parallel`
PlacedDecoder   weights, whole or as such blocks: what engine and sampler take in the place of a decoder
program         a jitted `Program` of the decoder: on a mesh one `jax.shard_map`, so that XLA moves nothing by itself
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from codec_jax.forest import KVPages, LatentPages, LatentQuantisation, Pages, Quantisation
from codec_jax.mesh import CONTEXT, TENSOR
from codec_jax.nnx.decoder import Decoder
from codec_jax.nnx.decoder_config import DecoderConfig
from codec_jax.nnx.parallel import ALONE, Parallel, repeated_bytes
from codec_jax.nnx.weights import dotted, split
from codec_jax.planning import Plan

#: Parameter -> the axis along which it is divided, and the sizes of its parts along this axis: a device has a block of
#: each. All other parameters are on every device.
_DIVIDED: dict[str, tuple[int, Callable[[Any], tuple[int, ...]]]] = {
    "embedding.embedding": (0, lambda config: (config.vocab_size,)),
    "attention.query_key_value.kernel": (1, lambda config: config.query_key_value_sizes),
    "attention.query_key_value.bias": (0, lambda config: config.query_key_value_sizes),
    "attention.sinks": (0, lambda config: (config.num_q_heads,)),
    "attention.query.kernel": (1, lambda config: (config.num_q_heads * config.latent.query_dim,)),
    "attention.up_key": (1, lambda config: (config.num_q_heads,)),
    "attention.up_value": (1, lambda config: (config.num_q_heads,)),
    "attention.out.kernel": (0, lambda config: (config.num_q_heads * config.value_dim,)),
    "mlp.gate_up.kernel": (1, lambda config: config.gate_up_sizes),
    "mlp.down.kernel": (0, lambda config: (config.mlp_size,)),
    **{
        f"mlp.{name}": (0, lambda config: (config.mixture.num_experts,))
        for name in ("gate_up", "gate_up_bias", "down", "down_bias")
    },
    "mlp.shared.gate_up.kernel": (1, lambda config: (config.mixture.shared_size,) * 2),
    "mlp.shared.down.kernel": (0, lambda config: (config.mixture.shared_size,)),
    "head.kernel": (1, lambda config: (config.vocab_size,)),
}


class Cut(NamedTuple):
    """How one parameter is divided: the block of a device has one run of each part."""

    axis: int
    sizes: tuple[int, ...]  # of the parts
    copies: tuple[int, ...]  # how many groups of devices have the same of a part: more than one for shared kv heads
    parallel: Parallel
    divisions: int  # of a group's run among its devices: 1 where all have the whole of it

    @classmethod
    def of(cls, config: DecoderConfig, parallel: Parallel, path: str, shape: tuple[int, ...]) -> Cut:
        """Look a parameter up by its dotted path."""
        name = re.sub(r"^blocks\.\d+\.", "", path)
        if name not in _DIVIDED or parallel.devices == 1:
            return cls(0, shape[:1], (1,), ALONE, 1)
        axis, sizes_of = _DIVIDED[name]
        sizes, shared = sizes_of(config), max(parallel.tensor // config.num_kv_heads, 1)
        if not name.startswith("attention.query_key_value."):
            return cls(axis, sizes, (1,) * len(sizes), parallel, parallel.context)
        divisions = 1 if repeated_bytes(config, parallel) else parallel.context
        return cls(axis, sizes, (1, shared, shared), parallel, divisions)

    @property
    def widths(self) -> tuple[int, ...]:
        """Return the size of each run."""
        parts = zip(self.sizes, self.copies, strict=True)
        return tuple(size * copies // (self.parallel.tensor * self.divisions) for size, copies in parts)

    def starts(self, device: Any) -> tuple[Any, ...]:
        """Return where each run of a device begins in its part."""
        context, divisions = self.parallel.context, self.divisions
        return tuple(
            (device // (context * copies) * divisions + device % divisions) * width
            for width, copies in zip(self.widths, self.copies, strict=True)
        )

    def spec(self, axis: int) -> PartitionSpec:
        """Return what divides that axis of an array among the devices in the order of their numbers."""
        return PartitionSpec(*[None] * axis, self.parallel.axes) if self.parallel.axes else PartitionSpec()


@dataclass(frozen=True, eq=False)
class PlacedDecoder:
    """The weights of a decoder where they are read: whole, or divided among the devices of a mesh.

    `Engine` and `Sampler` take one in the place of a decoder. `Checkpoint.load` with a mesh reads one from files.

    >>> from codec_jax.nnx import PlacedDecoder
    >>> config = DecoderConfig(64, 32, 64, num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=16)
    >>> mesh = jax.make_mesh((1, 1), ("context", "tensor"))
    >>> engine = Engine(PlacedDecoder.of(Decoder(config, nnx.Rngs(0)), mesh), max_requests=8, num_pages=64)
    """

    graph: nnx.GraphDef[Decoder]
    weights: nnx.State  # the arrays of a mesh have columns in another order, and some of them more than once
    config: DecoderConfig  # of the whole decoder
    mesh: Mesh | None  # None: the weights are whole
    kinds: Mapping[str, jax.ShapeDtypeStruct]  # of the whole parameters, by dotted path

    @classmethod
    def of(cls, model: Decoder | PlacedDecoder, mesh: Mesh | None = None) -> PlacedDecoder:
        """Take the weights that a decoder has now: as they are, or divided among devices, one parameter after another.

        Args:
          model: a decoder; one that is placed is returned as it is.
          mesh: devices along axes "context" and "tensor", one of which may be missing; None for no division.

        Raises ValueError for a mesh that does not divide the decoder, or is not that of one that is placed.
        """
        if isinstance(model, PlacedDecoder):
            if mesh not in (None, model.mesh):
                raise ValueError(
                    f"mesh: expected {model.mesh}, on which the model is, got {mesh}; leave it out, or place the "
                    "model anew"
                )
            return model
        graph, weights = split(model)
        check_sizes(model.config, Parallel.of(mesh))
        return cls(graph, _divided(weights, model.config, mesh), model.config, mesh, _kinds(weights))

    def updated(self, model: Decoder | PlacedDecoder) -> PlacedDecoder:
        """Return one with the weights that a model has now.

        Args:
          model: a decoder of the same config, whole or placed on the same mesh.

        Raises ValueError for another config, or weights of other shapes or dtypes.

        >>> from codec_jax.nnx import PlacedDecoder
        >>> config = DecoderConfig(64, 32, 64, num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=16)
        >>> placed = PlacedDecoder.of(Decoder(config, nnx.Rngs(0))).updated(Decoder(config, nnx.Rngs(1)))
        """
        given = PlacedDecoder.of(model)
        if given.mesh not in (None, self.mesh):
            raise ValueError(f"model: expected one that is whole, or placed on {self.mesh}, got one on {given.mesh}")
        mine, others = ({**vars(each.config), **each.kinds} for each in (self, given))
        for name in mine | others:
            if mine.get(name) != others.get(name):
                raise ValueError(
                    f"model: expected weights of the config, shapes and dtypes as before, got {name} = "
                    f"{others.get(name)} in place of {mine.get(name)}"
                )
        if given.mesh is None:
            given = replace(given, weights=_divided(given.weights, self.config, self.mesh))
        return replace(self, weights=given.weights)


def check_sizes(config: DecoderConfig, parallel: Parallel) -> None:
    """Raise ValueError unless so many devices divide a decoder."""
    tensor, context, devices = parallel.tensor, parallel.context, parallel.devices
    if config.qk_norm and config.qk_norm_over == "projection" and tensor > 1:
        raise ValueError(
            f"mesh: expected no axis {TENSOR!r} for norms over all heads of queries and of keys, got {tensor} devices; "
            f"use an axis {CONTEXT!r}"
        )
    if config.num_kv_heads % tensor and tensor % config.num_kv_heads:
        raise ValueError(
            f"mesh: expected an axis {TENSOR!r} that divides the {config.num_kv_heads} kv heads, or a multiple of "
            f"them, got {tensor} devices; use an axis {CONTEXT!r} for the others"
        )
    divided = {"num_q_heads": (config.num_q_heads, devices), "vocab_size": (config.vocab_size, devices)}
    if any(config.mixture_of(layer) is None for layer in range(config.num_layers)):
        divided["mlp_size"] = config.mlp_size, devices
    if config.mixture is not None:
        divided["num_experts"] = config.mixture.num_experts, devices
        divided["shared_size"] = config.mixture.shared_size or 0, devices
    if config.latent is None and not repeated_bytes(config, parallel):
        _, num_kv_heads = parallel.heads(config.num_q_heads, config.num_kv_heads)
        divided["columns of the kv heads of a group"] = num_kv_heads * config.head_dim, context
    for name, (size, parts) in divided.items():
        if size % parts:
            raise ValueError(
                f"mesh: expected {context} x {tensor} devices such that {parts} divides {name} = {size}, got a "
                f"remainder of {size % parts}; use fewer devices, and more engines"
            )


def assembled(
    mesh: Mesh | None, cut: Cut, axis: int, shape: tuple[int, ...], block: Callable[[int], Array | np.ndarray]
) -> Array | np.ndarray:
    """Make the array of the given shape of which device b has `block(b)` along an axis, on the devices at hand.

    Without a mesh there is one block.
    """
    if mesh is None:
        return block(0)
    sharding = NamedSharding(mesh, cut.spec(axis))
    size = shape[axis] // cut.parallel.devices
    places: dict[jax.Device, Any] = dict(sharding.addressable_devices_indices_map(shape))
    blocks = [jax.device_put(block((index[axis].start or 0) // size), device) for device, index in places.items()]
    return jax.make_array_from_single_device_arrays(shape, sharding, blocks)


class Program(NamedTuple):
    """A jitted function of weights and further arguments, of which devices are sent what each needs."""

    jitted: Any
    mesh: Mesh | None

    def __call__(self, weights: nnx.State, *arguments: Any) -> tuple:
        """Run it."""
        return self.jitted(weights, *_plans_sent(arguments, self.mesh))

    def lower(self, weights: nnx.State, *arguments: Any) -> Any:
        """Return what compiles it for arguments like these, which a call then finds compiled."""
        return self.jitted.lower(weights, *_plans_sent(arguments, self.mesh))


def program(
    graph: nnx.GraphDef[Decoder],
    config: DecoderConfig,
    mesh: Mesh | None,
    function: Callable[..., tuple],
    donate: tuple[int, ...],
) -> Program:
    """Return a jitted program of weights and further arguments.

    `function` gets the decoder, further arguments and `parallel`. It returns KV pages, and what is the same everywhere.
    """
    parallel = Parallel.of(mesh)

    def run(weights: nnx.State, *arguments: Any) -> tuple:
        return function(nnx.merge(graph, weights), *arguments, parallel=parallel)

    if mesh is None:
        return Program(jax.jit(run, donate_argnums=donate), mesh)

    def local(*arguments: Any) -> tuple:
        pages, *others = run(*arguments)
        return pages, others

    def divided(weights: nnx.State, *arguments: Any) -> tuple:
        specs = _weight_specs(weights, config, parallel), *_argument_specs(arguments, config, parallel)
        out_specs = _cache_specs(config, parallel), PartitionSpec()
        pages, others = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out_specs)(weights, *arguments)
        return pages, *others

    return Program(jax.jit(divided, donate_argnums=donate), mesh)


def new_pages(
    config: DecoderConfig,
    mesh: Mesh | None,
    num_pages: int,
    page_size: int,
    reconstructed_pages: int = 0,
    windowed_pages: int | None = None,
) -> tuple[Pages, ...]:
    """Return empty KV pages for every layer; each device of a mesh makes its own."""
    sizes = num_pages, page_size, reconstructed_pages, windowed_pages
    return config.new_cache(*sizes) if mesh is None else _pages_on(config, mesh, sizes)


@partial(jax.jit, static_argnames=("config", "mesh", "sizes"))
def _pages_on(config: DecoderConfig, mesh: Mesh, sizes: tuple[int, int, int, int | None]) -> tuple[Pages, ...]:
    parallel = Parallel.of(mesh)
    heads = parallel.heads(config.num_q_heads, config.num_kv_heads)
    of_device = replace(config, num_q_heads=heads[0], num_kv_heads=heads[1])
    new = partial(of_device.new_cache, sizes[0] // parallel.context, *sizes[1:])
    return jax.shard_map(new, mesh=mesh, in_specs=(), out_specs=_cache_specs(config, parallel))()


def everywhere(mesh: Mesh | None, tree: Any) -> Any:
    """Return arrays as all devices of a mesh have them; without one, on the default device."""
    return jax.device_put(tree) if mesh is None else _sent(tree, NamedSharding(mesh, PartitionSpec()))


def _sent(tree: Any, sharding: NamedSharding) -> Any:
    # Unlike `jax.device_put` it serves several processes, each of which has the whole array.
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index]), tree)


def _plans_sent(arguments: tuple, mesh: Mesh | None) -> tuple:
    """Send each device its part of plans that are spread."""
    if mesh is None:
        return arguments

    def send(x: Any) -> Any:
        if not isinstance(x, Plan) or not x.is_spread:
            return x
        return replace(x, arrays=_sent(x.arrays, NamedSharding(mesh, PartitionSpec(CONTEXT))))

    return jax.tree.map(send, arguments, is_leaf=lambda x: isinstance(x, Plan))


def _argument_specs(arguments: tuple, config: DecoderConfig, parallel: Parallel) -> tuple:
    pages = dict.fromkeys((KVPages, LatentPages), lambda _: _cache_specs(config, parallel)[0])
    specs: dict[type, Callable[[Any], Any]] = {Plan: lambda plan: plan.specs, **pages}
    return jax.tree.map(
        lambda x: specs.get(type(x), lambda _: PartitionSpec())(x), arguments, is_leaf=lambda x: type(x) in specs
    )


def _cache_specs(config: DecoderConfig, parallel: Parallel) -> tuple[Any, ...]:
    """Return how the pages of each layer are divided; all alike."""
    context, tensor = (name if name in parallel.axes else None for name in (CONTEXT, TENSOR))
    pages: Any = PartitionSpec(context, None, tensor, None)
    if config.cache_dtype.itemsize == 1:
        of_heads: Any = PartitionSpec(context, tensor, None) if config.kv_scales == "token" else PartitionSpec(tensor)
        of_devices: Any = PartitionSpec(parallel.axes)
        if config.latent is None:
            pages = KVPages(pages, pages, Quantisation(of_heads, of_heads, of_devices))
        else:
            pages = LatentPages(pages, pages, LatentQuantisation(pages, pages, of_devices))
    return (pages,) * config.num_layers


def _weight_specs(weights: nnx.State, config: DecoderConfig, parallel: Parallel) -> nnx.State:
    return _each(weights, config, parallel, lambda cut, _: cut.spec(cut.axis))


def divided(mesh: Mesh, cut: Cut, whole: Array) -> Array:
    """Give each device its block of a parameter."""
    shape = list(whole.shape)
    shape[cut.axis] = sum(cut.widths) * cut.parallel.devices

    def block(device: int) -> Array:
        return whole if cut.parallel.devices == 1 else _block(whole, np.int32(device), cut)

    return jax.block_until_ready(assembled(mesh, cut, cut.axis, tuple(shape), block))


def _divided(weights: nnx.State, config: DecoderConfig, mesh: Mesh | None) -> nnx.State:
    """Give each device its block of each parameter; the weights as they are without a mesh."""
    return weights if mesh is None else _each(weights, config, Parallel.of(mesh), partial(divided, mesh))


def _each(weights: nnx.State, config: DecoderConfig, parallel: Parallel, of: Callable[[Cut, Any], Any]) -> nnx.State:
    """Replace each parameter."""
    return nnx.from_flat_state([
        (path, parameter.replace(of(Cut.of(config, parallel, dotted(path), parameter.shape), parameter[...])))
        for path, parameter in nnx.to_flat_state(weights)
    ])  # fmt: skip


@partial(jax.jit, static_argnames="cut")
def _block(whole: Array, device: Int[Array, ""], cut: Cut) -> Array:
    """Return the block of a device; which one is no constant, so that one program serves all."""
    offsets = np.cumsum((0, *cut.sizes)).tolist()
    runs = zip(offsets, cut.starts(device), cut.widths, strict=False)
    return jnp.concatenate(
        [lax.dynamic_slice_in_dim(whole, offset + start, width, cut.axis) for offset, start, width in runs], cut.axis
    )


def _kinds(weights: nnx.State) -> dict[str, jax.ShapeDtypeStruct]:
    return {dotted(path): jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in nnx.to_flat_state(weights)}
