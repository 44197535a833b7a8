"""Checks of arguments; each error names the argument, what was expected, and what came."""

import contextlib
from types import UnionType
from typing import Any, TypeGuard, get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from codec_jax.arrays import Integers


def int_array(name: str, value: Integers) -> Int[np.ndarray, " n"]:
    """Return `value` as a vector of integers of any width, or raise ValueError if it is none."""
    try:
        array = np.asarray(value)
    except ValueError:  # lists of several lengths
        raise ValueError(f"{name}: expected a list of integers, got {value!r:.80}") from None
    if array.ndim != 1 or not (array.size == 0 or np.issubdtype(array.dtype, np.integer)):
        # NumPy has no integers of more than 64 bits.
        if isinstance(value, list | tuple) and all(map(is_integer, value)):
            raise ValueError(f"{name}: expected integers below 2**31, got {min(value)} to {max(value)}")
        raise ValueError(f"{name}: expected a list of integers, got {array.dtype} of shape {array.shape}")
    return array


def int_vector(name: str, value: Integers) -> Int[np.ndarray, " n"]:
    """Return `value` as an int64 vector of numbers that int32 can hold, or raise ValueError."""
    array = int_array(name, value)
    if array.size and max(abs(int(array.min())), abs(int(array.max()))) >= 2**31:
        raise ValueError(f"{name}: expected integers below 2**31, got {array.min()} to {array.max()}")
    return array.astype(np.int64)


def is_integer(value: Any) -> TypeGuard[int]:
    """Whether a value is a whole number of Python or NumPy; a bool is none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def integer(name: str, value: Any, minimum: int = 1, below: int = 2**31) -> int:
    """Return an integer of at least `minimum`, below what int32 can hold, or raise ValueError."""
    if is_integer(value) and minimum <= value < below:
        return int(value)
    limit = f" and below {below}" if is_integer(value) and value >= below else ""
    raise ValueError(f"{name}: expected an integer of at least {minimum}{limit}, got {value!r:.100}")


def number(name: str, value: Any) -> float:
    """Return a number that is finite in float32, or raise ValueError."""
    if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool):
        # Integers of hundreds of digits raise OverflowError.
        with np.errstate(over="ignore"), contextlib.suppress(OverflowError):
            if np.isfinite(np.float32(value)):
                return float(value)
    raise ValueError(f"{name}: expected a finite number, got {value!r:.100}")


def boolean(name: str, value: Any) -> bool:
    """Return True or False, or raise ValueError."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name}: expected True or False, got {value!r:.100}")
    return bool(value)


def array(name: str, value: Any) -> Array:
    """Return what makes a JAX array as one, or raise ValueError."""
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: expected an array, got {type(value).__name__}") from None


def host_array(name: str, value: Any) -> np.ndarray:
    """Return what makes a NumPy array as one, or raise ValueError for rows of several lengths."""
    try:
        return np.asarray(value)
    except ValueError:
        raise ValueError(f"{name}: expected rows of one length, got rows of several") from None


def shape(name: str, value: Any, **axes: int | None) -> dict[str, int]:
    """Return the sizes of an array's axes, or raise ValueError unless they are these, in order; None is any size."""
    got = tuple(value.shape)
    if len(got) != len(axes) or any(size not in (None, of) for size, of in zip(axes.values(), got, strict=True)):
        expected = ", ".join(axis if size is None else f"{axis} = {size}" for axis, size in axes.items())
        raise ValueError(f"{name}: expected shape [{expected}], got {got}")
    return dict(zip(axes, got, strict=True))


def each(name: str, values: np.ndarray, fits: np.ndarray, expected: str) -> None:
    """Raise ValueError, with the first of the values that does not fit, unless all do."""
    if not fits.all():
        at = tuple(np.argwhere(~fits)[0].tolist())
        raise ValueError(f"{name}: expected {expected}, got {name}[{', '.join(map(str, at))}] = {values[at]}")


def float_dtype(name: str, value: Any, *others: jnp.dtype) -> None:
    """Raise ValueError unless a dtype is one that attention takes, or one of the others."""
    taken = (*map(jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)), *others)
    with contextlib.suppress(TypeError):  # of what is no dtype at all
        value = jnp.dtype(value)
    if not isinstance(value, np.dtype) or value not in taken:
        expected = ", ".join(("float32", "bfloat16", *(str(dtype) for dtype in others)))
        raise ValueError(f"{name}: expected {expected} or float16, got {value!s:.100}")


def instance(name: str, value: Any, kind: type | UnionType) -> None:
    """Raise TypeError unless the value is of a type, or of one of several."""
    if not isinstance(value, kind):
        kinds = (kind,) if isinstance(kind, type) else get_args(kind)
        raise TypeError(
            f"{name}: expected a {' or '.join(each.__name__ for each in kinds)}, got {type(value).__name__}"
        )


def function(name: str, value: Any) -> None:
    """Raise TypeError unless the value is a function, or None."""
    if value is not None and not callable(value):
        raise TypeError(f"{name}: expected a function or None, got {type(value).__name__}")


def page_size(value: Any) -> int:
    """Return a positive multiple of 8, or raise ValueError."""
    if is_integer(value) and value > 0 and value % 8 == 0:
        return int(value)
    raise ValueError(f"page_size: expected a positive multiple of 8, got {value!r}")


def tokens(name: str, value: Int[np.ndarray, " n"], vocab_size: int) -> None:
    """Raise ValueError unless every token is in the vocabulary."""
    each(name, value, (value >= 0) & (value < vocab_size), f"tokens in [0, {vocab_size})")
