"""The exceptions that callers may want to catch apart from a plain ValueError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class OutOfPagesError(RuntimeError):
    """The page pool cannot serve a reservation; nothing was allocated and nothing was written.

    When `nnx.Sampler.decode` runs out after some intervals, `state` and `generated` hold what it had reached: prune
    requests from the state and go on from there.

    >>> PagePool.create(2).allocate(3)
    Traceback (most recent call last):
    codec_jax.errors.OutOfPagesError: the pool has 2 free pages of 2, 3 are needed; retire requests, ...
    """

    state: Any = None
    generated: Any = None


class LogitsError(FloatingPointError):
    """The logits of some requests are not finite: the weights are not, or numbers of a context have blown up.

    When `nnx.Sampler.decode` meets them, `state` and `generated` hold what it had reached, with tokens of these
    `requests` that mean nothing: prune them from the state and go on with the others.
    """

    requests: Sequence[int] = ()
    state: Any = None
    generated: Any = None

    @classmethod
    def of(cls, requests: Sequence[int], state: Any, generated: Any) -> LogitsError:
        """Say which requests they are.

        Args:
          requests: request slots whose logits are not finite.
          state: what `nnx.Sampler.decode` had reached, a `Decoding`.
          generated: the tokens up to there.
        """
        error = cls(
            f"logits: expected finite numbers, got others for requests {requests}; "
            "are the weights finite? The others go on with the error's state, once these are pruned from it"
        )
        error.requests, error.state, error.generated = requests, state, generated
        return error


class OutOfSlotsError(RuntimeError):
    """A forest has no free request slot left; the forest that was passed in is unchanged.

    >>> Forest.from_nodes([-1], [30], [0]).fork([0])
    Traceback (most recent call last):
    codec_jax.errors.OutOfSlotsError: requests: 1 forks need as many free request slots, got 0 of 1; ...
    """


class PlanError(ValueError):
    """A plan does not belong to the forest or the query that it is used with, or it is past its steps.

    >>> plan = make_plan(Forest.from_nodes([-1], [30], [0]), num_q_heads=8, num_kv_heads=2, head_dim=64)
    >>> plan.check(Forest.from_nodes([-1], [50], [0]))
    Traceback (most recent call last):
    codec_jax.errors.PlanError: plan: expected a plan for this forest, got one for another; make a plan for this forest
    """
