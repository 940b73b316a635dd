"""Settings dataclasses: markers of their fields, and what their docstrings say."""

NOT_A_KEY = {"key": False}
"""Metadata of a field that the program fills in and no config sets: `field(default=1, metadata=NOT_A_KEY)`."""


def first_paragraph(cls: type) -> str:
    """What a class's docstring says first, on one line."""
    return " ".join((cls.__doc__ or "").strip().partition("\n\n")[0].split())
