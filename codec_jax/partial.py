"""PAC and POR in plain jnp: the public names of `codec_jax.attention.pac_por`."""

from codec_jax.attention.pac_por import Partial, pac, por, por_segments

__all__ = ["Partial", "pac", "por", "por_segments"]
