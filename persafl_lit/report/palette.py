"""One colour, marker and dash per method name, the same in every plot and file."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

# Okabe and Ito's colours: distinct for every kind of colour vision. Their yellow is left out (unreadable on white) for
# a grey.
BLACK, ORANGE, SKY, GREEN, BLUE, VERMILLION, PURPLE, GREY = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
    "#8C8C8C",
)
COLOURS = (BLACK, ORANGE, SKY, GREEN, BLUE, VERMILLION, PURPLE, GREY)

# The same shape in both libraries. Known methods never use the markers of unknown ones.
PLOTLY_MARKERS = {
    "o": "circle",
    "s": "square",
    "D": "diamond",
    "^": "triangle-up",
    "v": "triangle-down",
    "X": "x",
    "P": "cross",
    "*": "star",
}
STRANGER_MARKERS = {"p": "pentagon", "h": "hexagon2", "<": "triangle-left", ">": "triangle-right", "8": "octagon"}
PLOTLY_MARKERS |= STRANGER_MARKERS
DASHES = {"-": "solid", "--": "dash", ":": "dot", "-.": "dashdot"}


RAMP = ("#440154", "#3B528B", "#21908C", "#5DC863")  # viridis without its yellow


class Style(NamedTuple):
    """As matplotlib names it; `PLOTLY_MARKERS` and `DASHES` translate."""

    colour: str
    marker: str = ""
    dash: str = "-"


# Solid: asynchronous; dashed: rounds.
KNOWN = {
    "persafl_me": Style(VERMILLION, "o"),
    "persafl_maml": Style(BLUE, "s"),
    "fedasync": Style(GREEN, "D"),
    "fedavg": Style(BLACK, "^", "--"),
    "per_fedavg": Style(SKY, "s", "--"),
    "pfedme": Style(ORANGE, "o", "--"),
    "scaffold": Style(PURPLE, "v", "--"),
    "fedprox": Style(GREY, "X", "--"),
    "fedasync_mix": Style(GREEN, "P", "-."),
    "fedbuff": Style(PURPLE, "*", "-."),
    "local": Style(GREY, "v", ":"),
    "fedper": Style(ORANGE, "P"),
    "fedrep": Style(SKY, "P"),
    "lg_fedavg": Style(BLUE, "P"),
    "fedbn": Style(GREY, "P"),
    "ditto": Style(PURPLE, "D"),
    "apfl": Style(VERMILLION, "D"),
    "fedavgm": Style(BLACK, "P", "--"),
    "fedadam": Style(BLUE, "^", "--"),
    "fedyogi": Style(GREEN, "X", "--"),
    "fedadagrad": Style(SKY, "*", "--"),
    "ca2fl": Style(BLUE, "X", "-."),
    "ace": Style(SKY, "o"),
    "aced": Style(SKY, "D", "-."),
}


def style_of(method: str, turn: int = 0) -> Style:
    """A known method's style, or one that follows from the name alone; the same again, in another `turn`, has another
    dash."""
    if turn:
        style, dashes = style_of(method), list(DASHES)
        return style._replace(dash=dashes[(dashes.index(style.dash) + turn) % len(dashes)])
    if method in KNOWN:
        return KNOWN[method]
    number = int(hashlib.sha256(method.encode(errors="replace")).hexdigest(), 16)
    number, colour = divmod(number, len(COLOURS))
    return Style(COLOURS[colour], list(STRANGER_MARKERS)[number % len(STRANGER_MARKERS)], "-.")


def value_style(index: int, count: int) -> Style:
    """Of the values of a key, in their order: from dark to light."""
    place = index / max(count - 1, 1) * (len(RAMP) - 1)
    low = min(int(place), len(RAMP) - 2)
    mixed = [
        round((1 - place + low) * int(RAMP[low][i : i + 2], 16) + (place - low) * int(RAMP[low + 1][i : i + 2], 16))
        for i in (1, 3, 5)
    ]
    return Style("#" + "".join(f"{part:02X}" for part in mixed), list(PLOTLY_MARKERS)[index % len(PLOTLY_MARKERS)])


def schedule_style(index: int) -> Style:
    """Schedules are not methods: they are drawn in black and greys."""
    colours, dashes = ("#222222", "#777777", "#AAAAAA"), list(DASHES)
    return Style(colours[index % len(colours)], dash=dashes[index % len(dashes)])
