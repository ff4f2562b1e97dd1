"""Lines that can be told apart: a colour and a dash each, so that neither is needed alone.

Every colour has a contrast of 3:1 or more on the light and on the dark surface (tests hold that), so that a figure
fits either theme and a change of theme needs no new one.
"""

COLOURS = (
    "#d9581a", "#3f86cc", "#179180", "#9a74dc", "#cf559f", "#8f8622",
    "#e0504c", "#7f8b98", "#4d9c3a", "#ab7748", "#2a96b3", "#6f7ce6",
)  # fmt: skip
DASHES = ("solid", "dash", "dot", "dashdot")
REST = "#7f8b98"
COLD = "#3f86cc"
SURFACES = ("#ffffff", "#1c1816")


def colour(index: int) -> str:
    """The colour of line number ``index``; after twelve they start anew, with another dash."""
    return COLOURS[index % len(COLOURS)]


def dash(index: int) -> str:
    """The dash of line number ``index``."""
    return DASHES[(index + index // len(COLOURS)) % len(DASHES)]


def translucent(hex_colour: str, alpha: float) -> str:
    """A colour with an opacity, as CSS writes it."""
    red, green, blue = (int(hex_colour[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"
