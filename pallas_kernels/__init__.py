"""Kernels that run plans, a folder for each GPU generation, and the format that they share with the planner.

They know rows, blocks and segments, never trees. A new generation is a folder with a `Family`, and its name here.
Mixtures of experts have a kernel, too: `hopper.experts`.
"""

from pallas_kernels.ampere import AMPERE
from pallas_kernels.family import Call, Family, Tiling
from pallas_kernels.heads import Heads, Scores, Window
from pallas_kernels.hopper import HOPPER, HOPPER_LATENT

#: Best first where several serve a device.
FAMILIES = (HOPPER, HOPPER_LATENT, AMPERE)

__all__ = [
    "AMPERE",
    "FAMILIES",
    "HOPPER",
    "HOPPER_LATENT",
    "Call",
    "Family",
    "Heads",
    "Scores",
    "Tiling",
    "Window",
]
