"""Cost models whose numbers are round."""

from codec_jax import CostModel
from codec_jax.planning.cost import HeadLayout


def cost_model(
    layout: HeadLayout,
    *,
    block_tokens: int = 128,
    narrow: tuple[float, float] = (2.0, 1.0),
    wide: tuple[float, float] = (2.0, 1.8),
    masked: float = 1.25,
    segment: tuple[float, float] = (3.5, 4.0),
) -> CostModel:
    """Return a model by the time of a block, from memory and cached, in a segment of one tile and of two."""
    tokens = (64, 1024, 32768)
    memory, cached = (
        tuple(tuple(of_block[source] * n / block_tokens for n in tokens) for of_block in (narrow, wide))
        for source in (0, 1)
    )
    return CostModel(
        device="a test",
        **layout._asdict(),
        dtype="bfloat16",
        rows=(64, 128),
        tokens=tokens,
        memory_us=memory,
        cached_us=cached,
        masked=masked,
        segment_us=segment,
        launch_us=10.0,
        stream_us=0.05,
    )
