"""PAC and POR in plain jnp, and POR across devices: the public names of `pac_por` and `exchange` in `attention`."""

from codec_jax.attention.exchange import merge_everywhere, merge_heads
from codec_jax.attention.pac_por import Partial, add_sinks, pac, por, por_segments

__all__ = ["Partial", "add_sinks", "merge_everywhere", "merge_heads", "pac", "por", "por_segments"]
