"""Multi-head latent attention: the public names of `codec_jax.attention.latent`."""

from codec_jax.attention.latent import latent_attention, reconstruct

__all__ = ["latent_attention", "reconstruct"]
