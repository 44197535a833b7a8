"""Two ways to run a plan: the kernels of some GPU generation, or XLA on any device."""

from __future__ import annotations

import warnings
from typing import Any

import jax

from codec_jax.attention.xla import XLA
from pallas_kernels import FAMILIES, Family, Heads, Scores
from pallas_kernels.compat import LINKS_KERNELS
from pallas_kernels.plan_format import PlanArrays

#: Best first.
BACKENDS = (*FAMILIES, XLA)


def check_name(implementation: Any) -> None:
    """Raise ValueError for a name that no backend has."""
    names = list(dict.fromkeys(backend.name for backend in BACKENDS))
    if implementation not in (None, *names):
        raise ValueError(f"implementation: expected {', '.join(map(repr, names))} or None, got {implementation!r}")


def choose(implementation: Any, heads: Heads, scores: Scores, plan: PlanArrays) -> Family:
    """Return the backend of a name, or the best one that serves the default device.

    Where that is XLA on a GPU, or kernels that JAX makes slow, a warning says why, once. Raises ValueError, with the
    reason, for a name that is none or a backend that cannot serve.
    """
    device = jax.devices()[0]
    reasons: list[str] = []
    check_name(implementation)
    for backend in BACKENDS:
        if implementation not in (None, backend.name):
            continue
        reason = backend.why_not(heads, device, scores, plan)
        if reason is None:
            # The registry of `warnings` shows a text once per process and line.
            if backend is XLA and reasons and device.platform == "gpu":
                warnings.warn(
                    f"attention runs on the xla path, which is correct but slow on a GPU; {'; '.join(reasons)}",
                    stacklevel=1,
                )
            if backend is not XLA and LINKS_KERNELS and device.platform == "gpu":
                warnings.warn(
                    f"jax: expected a version before 0.12, got {jax.__version__}, which compiles the kernels to be "
                    "linked and leaves them too few registers, so that they are slow; install 'jax[cuda13]<0.12'",
                    stacklevel=1,
                )
            return backend
        reasons.append(reason if implementation else f"not on {backend.name!r}: {reason}")
    # The xla path serves everything, so this is of a name. Two families have one name, and take different heads.
    raise ValueError(
        f"implementation: {implementation!r} cannot serve: {'; or '.join(dict.fromkeys(reasons))}; pass 'xla' or None"
    )
