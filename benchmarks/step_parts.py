"""Parts of a decode step, by the names of its kernels, those of JAX and those of vLLM."""

from __future__ import annotations

from collections.abc import Iterable

#: Parts, and what the names of their kernels have one of; the first that fits is meant. Products are those of XLA
#: (gemm_fusion_dot), or of cuBLAS, which are called by its newer kernels' prefix, by their library, or by what they
#: compute; what is none of these is "other": norms, rotation, writing K and V, rows in the order of experts, sampling.
PARTS = (
    ("other", ("split_heads", "add_norm", "add_up", "choose_experts", "arranged", "reshape_and_cache")),
    ("experts", ("experts",)),
    ("attention", ("mosaic_gpu", "cudnn", "sdpa", "flash", "merge_attn")),
    ("products", ("gemm", "gemv", "nvjet", "cutlass", "cublas", "splitk")),
)


def part_of(kernel: str) -> str:
    """Say which of `PARTS` a kernel belongs to, by its name, or "other"."""
    return next((part for part, names in PARTS if any(name in kernel.lower() for name in names)), "other")


def parts_of(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Sum the microseconds of kernels, given by name, and those of each part.

    Raises RuntimeError if none of them is of attention: they are then not those of a step, or have other names.
    """
    times = dict.fromkeys((part for part, _ in PARTS), 0.0)
    for name, us in kernels:
        times[part_of(name)] += us
    if not times["attention"]:
        names = " or ".join(dict(PARTS)["attention"])
        raise RuntimeError(f"kernels: expected some with {names} in their names, got none")
    return {"kernel_us": sum(times.values())} | {f"{part}_us": us for part, us in times.items()}
