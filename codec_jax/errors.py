"""The exceptions that callers may want to catch apart from a plain ValueError."""

from typing import Any


class OutOfPagesError(RuntimeError):
    """The page pool cannot serve a reservation; nothing was allocated and nothing was written.

    When `nnx.Sampler.decode` runs out after some intervals, `state` and `generated` hold what it had reached: prune
    requests from the state and go on from there.
    """

    state: Any = None
    generated: Any = None


class LogitsError(FloatingPointError):
    """The logits of some requests are not finite: the weights are not, or numbers of a context have blown up.

    When `nnx.Sampler.decode` meets them, `state` and `generated` hold what it had reached, with tokens of these
    requests that mean nothing: prune them from the state and go on with the others.
    """

    state: Any = None
    generated: Any = None


class OutOfSlotsError(RuntimeError):
    """A forest has no free request or node slot left; the forest that was passed in is unchanged."""


class PlanError(ValueError):
    """A plan does not belong to the forest or the query that it is used with, or it is past its steps."""
