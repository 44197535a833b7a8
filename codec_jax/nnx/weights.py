"""Fill a decoder with weights from elsewhere, without making others first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array
from tqdm import tqdm

from codec_jax import checks
from codec_jax.nnx.decoder import Block, Decoder
from codec_jax.nnx.decoder_config import DecoderConfig


def split(model: Decoder) -> tuple[nnx.GraphDef[Decoder], Any]:
    """Return a model's structure, and its weights as they are now: the model's own variables stay with it."""
    checks.instance("model", model, Decoder)
    graph, weights = nnx.split(model)
    return graph, jax.tree.map(lambda x: x, weights)


def parameter_shapes(config: DecoderConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shape and dtype of every parameter by its dotted path, such as blocks.0.attention.out.kernel."""
    # Tracing all blocks of a published model takes seconds, and these are of two kinds: with experts, or without.
    kinds = {config.mixture_of(layer): layer for layer in range(config.num_layers)}
    blocks = {kind: _shapes(partial(Block, config, layer)) for kind, layer in kinds.items()}
    shapes = _shapes(partial(Decoder, replace(config, num_layers=1)))
    return {path: shape for path, shape in shapes.items() if not path.startswith("blocks.")} | {
        f"blocks.{layer}.{path}": shape
        for layer in range(config.num_layers)
        for path, shape in blocks[config.mixture_of(layer)].items()
    }


def filled(
    config: DecoderConfig, weight: Callable[[str, jax.ShapeDtypeStruct], Array], *, progress: bool = False
) -> tuple[nnx.GraphDef[Decoder], nnx.State]:
    """Return a decoder's structure, and what `weight` returns for each dotted path and shape, one after another.

    `progress` shows a bar.
    """
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
    parameters = nnx.to_flat_state(state)
    for path, parameter in tqdm(parameters, desc="weights", unit="tensor", disable=not progress):
        # Waiting bounds what is in flight, on the host and on the device, to one parameter.
        parameter.set_value(jax.block_until_ready(weight(dotted(path), parameter.get_value())))
    return graph, nnx.from_flat_state(parameters)


def dotted(path: tuple) -> str:
    """Return a parameter's path as text, such as blocks.0.attention.out.kernel."""
    return ".".join(map(str, path))


def _shapes(make: Callable[[nnx.Rngs], nnx.Module]) -> dict[str, jax.ShapeDtypeStruct]:
    state = nnx.state(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    return {dotted(path): parameter.get_value() for path, parameter in nnx.to_flat_state(state)}
