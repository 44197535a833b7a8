"""Fill a decoder with weights from elsewhere, without making others first."""

from __future__ import annotations

from collections.abc import Callable

import jax
from flax import nnx
from jaxtyping import Array
from tqdm import tqdm

from codec_jax.nnx.decoder import Decoder, DecoderConfig


def parameter_shapes(config: DecoderConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shape and dtype of every parameter by its dotted path, such as blocks.0.attention.out.kernel."""
    state = nnx.state(_abstract(config))
    return {_dotted(path): parameter.get_value() for path, parameter in nnx.to_flat_state(state)}


def filled_decoder(
    config: DecoderConfig, weight: Callable[[str, jax.ShapeDtypeStruct], Array], *, progress: bool = False
) -> Decoder:
    """Make a decoder of what `weight` returns for each dotted path and shape, one after another.

    `progress` shows a bar.
    """
    graph, state = nnx.split(_abstract(config))
    parameters = nnx.to_flat_state(state)
    for path, parameter in tqdm(parameters, desc="weights", unit="tensor", disable=not progress):
        # Waiting bounds what is in flight, on the host and on the device, to one parameter.
        parameter.set_value(jax.block_until_ready(weight(_dotted(path), parameter.get_value())))
    return nnx.merge(graph, nnx.from_flat_state(parameters))


def _abstract(config: DecoderConfig) -> Decoder:
    return nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0)))


def _dotted(path: tuple) -> str:
    return ".".join(map(str, path))
