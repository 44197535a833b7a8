"""PAC and POR for every NVIDIA GPU since Ampere: warp-level products and cp.async, as Pallas Mosaic GPU kernels."""

from pallas_kernels.ampere.attend import attend
from pallas_kernels.ampere.tiling import tiling, why_not
from pallas_kernels.family import Family

AMPERE = Family("ampere", why_not, tiling, attend)
