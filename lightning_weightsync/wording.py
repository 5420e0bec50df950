"""How are names and amounts put into words? For messages of every part; imports nothing but Python's own."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(wanted: object, names: Iterable[object], most: int = 1, cutoff: float = 0.6) -> str:
    """``"; did you mean 'x'?"``, or nothing where no name is near.

    Args:
        wanted: What was given.
        names: What there is.
        most: How many are told.
        cutoff: How near, from 0 (anything) to 1 (the same).
    """
    close = difflib.get_close_matches(str(wanted), [str(name) for name in names], n=most, cutoff=cutoff)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def nearest_or_listed(wanted: object, names: Iterable[object], most: int = 8, cutoff: float = 0.6) -> str:
    """The nearest names; where none is near, those that there are, many cut short."""
    existing = [str(name) for name in names]
    there = f"; there is {listed(map(repr, existing), most)}" if existing else "; nothing is there"
    return nearest(wanted, existing, 3, cutoff) or there


def listed(names: Iterable[object], most: int = 24) -> str:
    """Names, separated by commas; many are cut short."""
    texts = [str(name) for name in names]
    more = len(texts) - most
    return (", ".join(texts[:most]) or "none") + (f" and {more} more" if more > 0 else "")


def ended(text: str) -> str:
    """A sentence with its full stop, for another one to follow."""
    return text if text.endswith("?") else f"{text}."


def size(nbytes: int) -> str:
    """Bytes for people."""
    for unit, count in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if nbytes >= count:
            return f"{nbytes / count:.3g} {unit}"
    return f"{nbytes} B"
