"""Axes of a device mesh, by the names that all parts of the library use.

data     devices that decode different requests
context  devices that share the KV pages: each page lives on one of them
tensor   devices that share the heads
"""

from __future__ import annotations

from jax.sharding import Mesh

from codec_jax import checks

DATA, CONTEXT, TENSOR = "data", "context", "tensor"


def axis_size(mesh: Mesh | None, axis: str) -> int:
    """Return the devices along an axis; 1 if there is no such axis, or no mesh."""
    return 1 if mesh is None else int(mesh.shape.get(axis, 1))


def check_mesh(mesh: Mesh | None, *axes: str) -> None:
    """Raise TypeError for what is no mesh, ValueError for one with other axes."""
    if mesh is None:
        return
    checks.instance("mesh", mesh, Mesh)
    if others := [name for name in mesh.axis_names if name not in axes]:
        raise ValueError(
            f"mesh: expected axes of {', '.join(map(repr, axes))} only, got {', '.join(map(repr, others))}; "
            "make one with jax.make_mesh, with these names"
        )
