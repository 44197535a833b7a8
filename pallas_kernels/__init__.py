"""GPU tiles for codec_jax: PAC and POR as Pallas kernels. They know rows, blocks and segments, never trees."""
