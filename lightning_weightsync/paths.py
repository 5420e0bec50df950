"""Which object does a path such as ``loss_module.nets[0]['q']`` name?

Paths come from configuration, so nothing in them is evaluated: a path is attribute names, integer indices and string
keys. ``nets.0.q`` and ``nets[0].q`` are the same path, so that ``state_dict`` names and hand-written paths meet.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_weightsync.wording import nearest_or_listed

__all__ = [
    "Attribute",
    "Index",
    "Key",
    "PathError",
    "Segment",
    "format_path",
    "parse_path",
    "read_map",
    "resolve",
    "resolve_first",
]

_TOKEN = re.compile(
    r"""(?P<number>(?:(?<=\.)|^)[0-9]+(?!\w))
      | (?P<name>[^\W\d]\w*)
      | \[\s*(?P<index>-?[0-9]+)\s*\]
      | \[\s*(?:'(?P<single>[^']*)'|"(?P<double>[^"]*)")\s*\]""",
    re.VERBOSE,
)
_GRAMMAR = "a path is names, [int] and ['key'], for example loss_module.nets[0]['q']"


class PathError(ValueError):
    """A path cannot be read, or names nothing: the message says which part failed, where, and what exists there.

    Args:
        message: The sentence shown to the user.
        depth: How many parts of the path were found before the one that failed.
    """

    def __init__(self, message: str, depth: int = 0) -> None:
        super().__init__(message)
        self.depth = depth


@dataclass(frozen=True)
class Attribute:
    """A part of a path, ``.name``."""

    name: str


@dataclass(frozen=True)
class Index:
    """A part of a path, ``[0]``, ``[-1]`` or ``.0``."""

    index: int


@dataclass(frozen=True)
class Key:
    """A part of a path, ``['key']``."""

    key: str


Segment = Attribute | Index | Key


def parse_path(text: str) -> tuple[Segment, ...]:
    """Split a path into its segments.

    Args:
        text: Names joined by dots, ``[int]`` (negative ones count from the end), ``['key']`` or ``["key"]``. A part
            that is all digits, as in ``nets.0``, means the same as ``nets[0]``.

    Returns:
        The segments, from the root outwards; at least one.

    Raises:
        PathError: The text is no path, or a name in it begins with two underscores.
        TypeError: ``text`` is no string.

    Example:
        >>> parse_path("nets[0]['q']") == parse_path('nets.0["q"]')
        True
    """
    if not isinstance(text, str):
        raise TypeError(f"a path is a string, got {text!r} ({type(text).__name__}); {_GRAMMAR}")
    segments, position = _read(text)
    if position < len(text) or not segments:
        rest = text[position:]
        found = (
            "it ends where a part is expected" if rest in ("", ".") else f"cannot read {rest!r} at character {position}"
        )
        raise PathError(f"path {text!r} is malformed: {found}; {_GRAMMAR}", len(segments))
    return tuple(segments)


def resolve(root: object, path: str | Sequence[Segment], *, root_name: str = "root") -> Any:
    """Follow a path from an object.

    Args:
        root: Where the path starts.
        path: The text, or what `parse_path` made of it.
        root_name: What errors call the root.

    Returns:
        The object that the path names: itself, not a copy.

    Raises:
        PathError: Some part names nothing. An error that a property raises (an ``AttributeError`` too) is shown as
            it is, and is the cause of the ``PathError``.
    """
    segments = parse_path(path) if isinstance(path, str) else tuple(path)
    here = root
    for depth, segment in enumerate(segments):
        try:
            here = _step(here, segment)
        except _StepError as reason:
            found = repr(format_path(segments[:depth])) if depth else f"the {root_name}"
            raise PathError(
                f"path {format_path(segments)!r} fails at {format_path([segment])!r} on {found} "
                f"({type(here).__name__}): {reason}",
                depth,
            ) from reason.__cause__
    return here


def resolve_first(roots: Sequence[tuple[str, object]], path: str | Sequence[Segment]) -> Any:
    """Follow a path from the first of several roots that has it.

    Args:
        roots: Pairs of a name for messages and an object; for example the LightningModule, then the Trainer.
        path: The text, or what `parse_path` made of it.

    Returns:
        The object that the path names.

    Raises:
        PathError: No root has it (the roots on which the path came furthest are told), or user code on the way raised.
    """
    segments = parse_path(path) if isinstance(path, str) else tuple(path)
    errors: list[PathError] = []
    for name, root in roots:
        try:
            return resolve(root, segments, root_name=name)
        except PathError as error:
            if error.__cause__ is not None:
                raise  # it is there, and it raised: another root must not hide that
            errors.append(error)
    depth = max((error.depth for error in errors), default=0)
    raise PathError("\n".join(str(error) for error in errors if error.depth == depth), depth)


def format_path(segments: Iterable[Segment]) -> str:
    """Write segments as text, in the one spelling that all spellings of a path share.

    Example:
        >>> format_path(parse_path('nets.0["q"]'))
        "nets[0]['q']"
    """
    text = ""
    for segment in segments:
        if isinstance(segment, Attribute):
            text += f".{segment.name}" if text else segment.name
        elif isinstance(segment, Index):
            text += f"[{segment.index}]"
        else:
            text += f'["{segment.key}"]' if "'" in segment.key else f"['{segment.key}']"
    return text


def read_map(given: Mapping[str, str] | Iterable[str]) -> dict[str, str]:
    """Destination -> source path, out of a mapping or of ``"destination=source"`` lines.

    The lines are for where a path cannot be a key: ``replay_buffer.transforms[0]`` on Hydra's command line, say.

    Raises:
        PathError: One of both is no path, a line has no ``=``, or a destination is given twice, in any spelling.
        TypeError: A destination, a source or a line is no string, or the whole is neither.

    Example:
        >>> read_map(["policy=actor", "transforms[0]=norms['obs=1']"])
        {'policy': 'actor', 'transforms[0]': "norms['obs=1']"}
    """
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(
            f"a map is a mapping, {{policy: actor}}, or a list of 'destination=source' lines, ['policy=actor']; got "
            f"the {type(given).__name__.replace('str', 'string')} {given!r}"
        )
    pairs = list(given.items()) if isinstance(given, Mapping) else [_pair(line) for line in given]
    read: dict[str, str] = {}
    spelled: dict[str, str] = {}
    for destination, source in pairs:
        place = format_path(_parsed(destination, "a destination"))
        _parsed(source, f"the source of {destination!r}")
        if place in spelled:
            first = read[spelled[place]]
            raise PathError(f"the destination {destination!r} is given twice: {first!r} and {source!r}")
        read[destination], spelled[place] = source, destination
    return read


def _parsed(path: str, what: str) -> tuple[Segment, ...]:
    try:
        return parse_path(path)
    except PathError as error:
        raise PathError(f"{what}: {error}", error.depth) from None
    except TypeError as error:
        raise TypeError(f"{what}: {error}") from None


def _pair(line: str) -> tuple[str, str]:
    """Both paths of ``"destination=source"``; a ``=`` in a key of the destination is none that separates them."""
    if not isinstance(line, str):
        raise TypeError(f"a line of a map is a string 'destination=source', got {line!r} ({type(line).__name__})")
    text = line.strip()
    _, end = _read(text)
    rest = text[end:].lstrip()
    if rest.startswith("="):
        return text[:end], rest[1:].strip()
    found = f"where a = is expected, there is {rest!r}" if rest else "it has no ="
    raise PathError(
        f"{line!r} is no line of a map, {found}: write 'destination=source', for example 'policy=actor'; {_GRAMMAR}"
    )


def _read(text: str) -> tuple[list[Segment], int]:
    """As many segments as can be read from the start, and where the rest begins."""
    segments: list[Segment] = []
    position = 0
    while True:
        after_dot = bool(segments) and text.startswith(".", position)
        token = _TOKEN.match(text, position + after_dot)
        bracketed = text.startswith("[", position + after_dot)
        if token is None or (segments and after_dot == bracketed):
            return segments, position
        segments.append(_segment(token, text))
        position = token.end()


class _StepError(Exception):
    """One step failed; where user code raised, that error is the ``__cause__``."""


def _segment(token: re.Match[str], text: str) -> Segment:
    number = token["number"] or token["index"]
    if number is not None:
        return Index(int(number))
    name = token["name"]
    if name is None:
        return Key(token["double"] if token["single"] is None else token["single"])
    if name.startswith("__"):
        raise PathError(f"path {text!r}: {name!r} is internal to Python; name an attribute of your own")
    return Attribute(name)


def _step(here: object, segment: Segment) -> Any:
    if isinstance(segment, Attribute):
        return _attribute(here, segment.name)
    wanted = segment.index if isinstance(segment, Index) else segment.key
    keys = _keys(here)
    if keys is not None:
        if wanted not in keys:
            raise _StepError(f"no key {wanted!r}{nearest_or_listed(str(wanted), keys)}")
    elif isinstance(wanted, str):
        raise _StepError(f"it has no string keys{nearest_or_listed(wanted, _attribute_names(here))}")
    else:
        length = _length(here)
        if length is None:
            raise _StepError(f"it cannot be indexed{nearest_or_listed(str(wanted), _attribute_names(here))}")
        if not -length <= wanted < length:
            allowed = f"{-length} to {length - 1} are allowed" if length else "it is empty"
            raise _StepError(f"index {wanted} is out of range: the length is {length}, {allowed}")
    return _guarded(f"reading {wanted!r}", lambda: here[wanted])  # type: ignore[index]


def _attribute(here: object, name: str) -> Any:
    if any(name in vars(cls) for cls in type(here).__mro__):
        # nn.Module.__getattr__ replaces the AttributeError that a property raised by "no attribute <property>", so
        # what a class defines is read past __getattr__.
        return _guarded(f"it exists, but reading {name!r}", lambda: object.__getattribute__(here, name))
    try:
        return getattr(here, name)
    except AttributeError:
        hint = f"; write ['{name}']" if name in (_keys(here) or ()) else nearest_or_listed(name, _attribute_names(here))
        raise _StepError(f"no attribute {name!r}{hint}") from None


def _guarded(what: str, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:
        raise _StepError(f"{what} raised {type(error).__name__}: {error}") from error


def _keys(here: object) -> list[Any] | None:
    """The keys of a dict, ModuleDict, ParameterDict, TensorDict and their like; None for anything else."""
    is_keyed = not isinstance(here, type) and hasattr(here, "__getitem__") and callable(getattr(here, "keys", None))
    return list(here.keys()) if is_keyed else None  # type: ignore[attr-defined]


def _length(here: object) -> int | None:
    try:
        return len(here) if hasattr(here, "__getitem__") else None  # type: ignore[arg-type]
    except TypeError:  # a 0-dim tensor has __len__, and it raises
        return None


def _attribute_names(here: object) -> list[str]:
    """What a user means by the attributes of this object; submodules and parameters first, never nn.Module's own."""
    if not isinstance(here, nn.Module):
        return [name for name in dir(here) if not name.startswith("_")]
    registered = [name for name, _ in (*here.named_children(), *here.named_parameters(recurse=False))]
    others = [name for name in dir(here) if not name.startswith("_") and not hasattr(nn.Module, name)]
    return list(dict.fromkeys(registered + others))
