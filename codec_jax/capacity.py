"""Capacities: the sizes that arrays are padded to, so that small changes keep compiled code valid."""


def bucket(size: int, least: int = 8) -> int:
    """Return the smallest of 2^i and 1.5 x 2^i that holds `size`, and `least` at the least: under 50% is padding."""
    power = least
    while power < size:
        if power + power // 2 >= size:
            return power + power // 2
        power *= 2
    return power
