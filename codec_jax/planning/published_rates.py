"""Published rates of GPUs, for plans on one that nobody has measured costs on: NVIDIA's data sheets.

Products are dense, of bfloat16, with sums in float32. An H200 reaches 0.94 of its published bandwidth and 0.66 of its
products in the kernels; others are taken to reach as much of theirs.
"""

from __future__ import annotations

from typing import NamedTuple


class Rates(NamedTuple):
    """Rates that a kernel reaches."""

    bytes_per_us: float
    flops_per_us: float


#: By `device_kind`, without "NVIDIA": GB/s of memory, TFLOP/s of products. An H200 is not in it: rooflines have its
#: measured rates where nothing else is known.
_PUBLISHED = {
    "A100-SXM4-40GB": (1555, 312), "A100-PCIE-40GB": (1555, 312), "A100-SXM4-80GB": (2039, 312),
    "A100 80GB PCIe": (1935, 312), "A30": (933, 165), "A10": (600, 125), "A10G": (600, 70), "A40": (696, 150),
    "RTX A6000": (768, 155), "GeForce RTX 3080": (760, 60), "GeForce RTX 3090": (936, 71),
    "L4": (300, 121), "L40": (864, 181), "L40S": (864, 362), "RTX 6000 Ada Generation": (960, 364),
    "GeForce RTX 4080": (717, 97), "GeForce RTX 4090": (1008, 165),
    "H100 80GB HBM3": (3350, 989), "H100 PCIe": (2000, 756), "H100 NVL": (3900, 835), "GH200 480GB": (4000, 989),
    "B200": (8000, 2250), "GeForce RTX 5090": (1792, 210),
}  # fmt: skip
_REACHED = (0.94, 0.66)


def published_rates(device_kind: str) -> Rates | None:
    """Return what kernels reach on a GPU by its data sheet; None for one that is not in the list.

    Args:
      device_kind: that of the JAX device.

    >>> from codec_jax.planning.published_rates import published_rates
    >>> rates = published_rates("NVIDIA A100-SXM4-80GB")
    >>> round(rates.bytes_per_us / 1e6, 2), round(rates.flops_per_us / 1e6)
    (1.92, 206)
    """
    if (published := _PUBLISHED.get(device_kind.removeprefix("NVIDIA "))) is None:
        return None
    gigabytes, teraflops = published
    return Rates(gigabytes * 1e3 * _REACHED[0], teraflops * 1e6 * _REACHED[1])
