"""How query rows make up a tile: whole units, the q heads of one kv head for one query token of one request."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

#: Query rows of a tile: what one warpgroup's wgmma takes.
TILE_ROWS = 64


class Packing(NamedTuple):
    """A tile is `units` units of `rows_of_unit` rows; unit u of tile t is unit t * units + u of the call."""

    group: int  # q heads per kv head (G)
    rows_of_unit: int  # G, or its largest divisor that fits a tile
    units: int

    @classmethod
    def of(cls, group: int) -> "Packing":
        """Pack as many rows as a tile holds without splitting a unit."""
        rows = max(size for size in range(1, TILE_ROWS + 1) if group % size == 0)
        return cls(group=group, rows_of_unit=rows, units=TILE_ROWS // rows)

    @property
    def tile_rows(self) -> int:
        """Rows of a tile that are in use."""
        return self.units * self.rows_of_unit

    @property
    def parts(self) -> int:
        """Units of one query token of one request."""
        return self.group // self.rows_of_unit

    def unit(self, number: Any, batch: int, tokens: int) -> tuple[Any, Any, Any]:
        """Return the request row, the query token and the part of a unit; those past the end repeat the last row."""
        of_token = lax.div(number, jnp.int32(self.parts)) if self.parts > 1 else number
        row = lax.div(of_token, jnp.int32(tokens)) if tokens > 1 else of_token
        token = lax.rem(of_token, jnp.int32(tokens)) if tokens > 1 else jnp.int32(0)
        return jnp.minimum(row, batch - 1), token, self.part(number)

    def part(self, number: Any) -> Any:
        """Return which part of its query token a unit is."""
        return lax.rem(number, jnp.int32(self.parts)) if self.parts > 1 else jnp.int32(0)

    def q_head(self, head: Any, part: Any, row: Any) -> Any:
        """Return the q head of a row of a tile, which is in a unit that is such a part of its kv head's."""
        return head * self.group + part * self.rows_of_unit + lax.rem(row, jnp.int32(self.rows_of_unit))
