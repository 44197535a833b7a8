"""A forest as a picture: a rectangle for each node, as wide as its tokens, as high as its readers."""

from html import escape

import numpy as np
from jaxtyping import Int

_WIDTH, _HEIGHT = 960, 420  # of the rectangles, in pixels
_TOP, _BOTTOM, _LEFT, _RIGHT = 44, 42, 12, 12
_ONE, _ALL = np.array([214, 230, 244]), np.array([8, 64, 129])  # colours: of one reader, and of all requests
_TICKS = 6


def draw(
    length: Int[np.ndarray, " nodes"],
    start: Int[np.ndarray, " nodes"],
    row_lo: Int[np.ndarray, " nodes"],
    row_hi: Int[np.ndarray, " nodes"],
    title: str,
) -> str:
    """Return an SVG drawing of the nodes that are read: positions to the right, requests downwards, depth first."""
    nodes = np.flatnonzero((row_hi > row_lo) & (length > 0))
    requests, tokens = int(row_hi.max(initial=0)), int((start[nodes] + length[nodes]).max(initial=1))
    row = min(_HEIGHT / max(requests, 1), 26.0)
    bottom = _TOP + row * requests
    size = f"{_LEFT + _WIDTH + _RIGHT} {bottom + _BOTTOM:.0f}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="{_LEFT}" y="18" font-size="14">{escape(title)}</text>',
        f'<text x="{_LEFT}" y="35" fill="#555">each rectangle is a node: width its tokens, height and colour the '
        f"requests that read it; {requests:,} in all</text>",
    ]
    for node in nodes.tolist():
        readers, count = int(row_hi[node] - row_lo[node]), int(length[node])
        x, y = _LEFT + _WIDTH * start[node] / tokens, _TOP + row * row_lo[node]
        width, height = max(_WIDTH * count / tokens, 1.0), max(row * readers, 1.0)
        dark = np.log(readers) / np.log(requests) if requests > 1 else 0.0
        colour = f"rgb{tuple(np.rint(_ONE + (_ALL - _ONE) * dark).astype(int).tolist())}"
        text = f"{count:,} tokens" + f" × {readers:,}" * (readers > 1)
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}" stroke="#fff" '
            f'stroke-width="{min(0.8, height / 4):.2f}"><title>node {node}: {count:,} tokens, '
            f"read by {readers:,} requests</title></rect>"
        )
        if width > 7 * len(text) and height > 12:
            parts.append(
                f'<text x="{x + width / 2:.1f}" y="{y + height / 2 + 4:.1f}" text-anchor="middle" '
                f'fill="{"#fff" if dark > 0.45 else "#123"}">{text}</text>'
            )
    for tick in range(_TICKS + 1):
        anchor = "start" if tick == 0 else "end" if tick == _TICKS else "middle"
        x, text = _LEFT + _WIDTH * tick / _TICKS, f"{tokens * tick // _TICKS:,}"
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16:.1f}" text-anchor="{anchor}" fill="#555">{text}</text>')
    middle = f'x="{_LEFT + _WIDTH / 2}" y="{bottom + 34:.1f}" text-anchor="middle" fill="#555"'
    parts.append(f"<text {middle}>position in the context (tokens)</text></svg>")
    return "\n".join(parts)
