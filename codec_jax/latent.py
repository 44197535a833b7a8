"""Multi-head latent attention: the public names of `attention.latent`, and of `planning.latent_forms`."""

from codec_jax.attention.latent import Reconstructed, latent_attention, reconstruct
from codec_jax.planning.latent_forms import choose_reconstructed

__all__ = ["Reconstructed", "choose_reconstructed", "latent_attention", "reconstruct"]
