"""PAC and POR for Hopper GPUs: wgmma, TMA and warpgroups in roles, as Pallas Mosaic GPU kernels."""

from pallas_kernels.family import Family
from pallas_kernels.hopper import latent_family
from pallas_kernels.hopper.attend import attend, attend_and_merge
from pallas_kernels.hopper.tiling import tiling, why_not

HOPPER = Family("mosaic", why_not, tiling, attend, attend_and_merge)
HOPPER_LATENT = Family("mosaic", latent_family.why_not, latent_family.tiling, latent_family.attend)
