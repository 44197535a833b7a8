"""Fill a decoder with weights from elsewhere, without making others first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array
from tqdm import tqdm

from codec_jax import checks
from codec_jax.nnx.decoder import Decoder, DecoderConfig


def split(model: Decoder) -> tuple[nnx.GraphDef[Decoder], Any]:
    """Return a model's structure, and its weights as they are now: the model's own variables stay with it."""
    checks.instance("model", model, Decoder)
    graph, weights = nnx.split(model)
    return graph, jax.tree.map(lambda x: x, weights)


def parameter_shapes(config: DecoderConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shape and dtype of every parameter by its dotted path, such as blocks.0.attention.out.kernel."""
    # All blocks are alike, and tracing a published model's takes seconds.
    state = nnx.state(_abstract(replace(config, num_layers=1)))
    return {
        dotted((*path[:1], i, *path[2:]) if path[0] == "blocks" else path): parameter.get_value()
        for path, parameter in nnx.to_flat_state(state)
        for i in range(config.num_layers if path[0] == "blocks" else 1)
    }


def filled(
    config: DecoderConfig, weight: Callable[[str, jax.ShapeDtypeStruct], Array], *, progress: bool = False
) -> tuple[nnx.GraphDef[Decoder], nnx.State]:
    """Return a decoder's structure, and what `weight` returns for each dotted path and shape, one after another.

    `progress` shows a bar.
    """
    graph, state = nnx.split(_abstract(config))
    parameters = nnx.to_flat_state(state)
    for path, parameter in tqdm(parameters, desc="weights", unit="tensor", disable=not progress):
        # Waiting bounds what is in flight, on the host and on the device, to one parameter.
        parameter.set_value(jax.block_until_ready(weight(dotted(path), parameter.get_value())))
    return graph, nnx.from_flat_state(parameters)


def dotted(path: tuple) -> str:
    """Return a parameter's path as text, such as blocks.0.attention.out.kernel."""
    return ".".join(map(str, path))


def _abstract(config: DecoderConfig) -> Decoder:
    return nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0)))
