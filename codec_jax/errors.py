"""The exceptions that callers may want to catch apart from a plain ValueError."""


class OutOfPagesError(RuntimeError):
    """The page pool cannot serve a reservation; nothing was allocated and nothing was written."""


class OutOfSlotsError(RuntimeError):
    """A forest has no free request or node slot left; the forest that was passed in is unchanged."""


class PlanError(ValueError):
    """A plan does not belong to the forest or the query that it is used with, or it is past its steps."""
