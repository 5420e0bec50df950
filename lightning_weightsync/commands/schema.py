"""Does each node of a configuration fit what it names? Keys and values against the signature of its ``_target_``.

There is no second list of arguments beside the code's own: what a class or function takes, and of which type, is read
from its signature, for our classes as for Lightning's and the user's. Nothing is built. A type that says nothing about
plain values (a class of the user's, say) allows all.
"""

from __future__ import annotations

import collections.abc
import importlib
import inspect
import types
import typing
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from lightning_weightsync.wording import ended, listed, nearest

MISSING = "???"
_HYDRA_KEYS = {"_target_", "_partial_", "_recursive_", "_convert_", "_args_"}
_LOOK_UPS = {f"hydra.utils.get_{what}" for what in ("class", "method", "static_method", "object")}
_NONE = type(None)
_STRINGS = (str, Path)
_LISTS = (list, tuple, set, collections.abc.Sequence, collections.abc.Iterable)
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
"""What plain values of each kind are given for."""


def check_tree(node: Any, key: str, supplied: Mapping[str, Collection[str]]) -> list[str]:
    """Check a node, and every node below it.

    Args:
        node: Plain dicts, lists and values.
        key: Where it is in the configuration, for messages.
        supplied: By key, the arguments that somebody else gives.

    Returns:
        A sentence for each problem.
    """
    problems: list[str] = []
    if isinstance(node, Mapping):
        if "_target_" in node:
            problems += check_node(node, key, supplied.get(key, ()))
        for name, value in node.items():
            problems += check_tree(value, f"{key}.{name}" if key else str(name), supplied)
    elif isinstance(node, list):
        for index, value in enumerate(node):
            problems += check_tree(value, f"{key}[{index}]", supplied)
    elif node == MISSING:
        problems.append(f"{key} has no value (???): set it in the YAML, or on the command line, {key}=...")
    return problems


def check_node(node: Mapping[str, Any], key: str, supplied: Collection[str] = ()) -> list[str]:
    """Check the keys and values of one node that has a ``_target_``."""
    name = node["_target_"]
    if not isinstance(name, str) or name == MISSING:
        return [] if name == MISSING else [f"{key}._target_={name!r}: a dotted name is needed, 'package.module.Name'"]
    target, problem = find(name, f"{key}._target_")
    if target is None:
        return [problem]
    path = node.get("path")
    if name in _LOOK_UPS and isinstance(path, str) and path != MISSING:
        found, problem = find(path, f"{key}.path")
        return [] if found is not None else [problem]
    return check_arguments(target, node, key, supplied)


def find(name: str, key: str) -> tuple[Any, str]:
    """The object with a dotted name; or ``None``, and why not."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        return None, f"{key}={name!r}: a dotted name is needed, 'package.module.Name'"
    found: Any = None
    for count, part in enumerate(parts):
        here = ".".join(parts[:count])
        wanted = ".".join(parts[: count + 1])
        try:
            if count and hasattr(found, part):
                found = getattr(found, part)
                continue
            found = importlib.import_module(wanted)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{wanted}.".startswith(f"{error.name}."):
                return None, f"{key}={name!r}: importing {wanted} raised {type(error).__name__}: {error}"
            if not count:
                where = "in the working directory, on PYTHONPATH and among what is installed"
                return None, f"{key}={name!r}: there is no module {part!r}; modules are looked for {where}"
            there = [n for n in dir(found) if not n.startswith("_")]
            return None, f"{key}={name!r}: {here} has no {part!r}{nearest(part, there)}"
        except Exception as error:
            return None, f"{key}={name!r}: importing {wanted} raised {type(error).__name__}: {error}"
    return found, ""


def check_arguments(
    target: Callable[..., Any], node: Mapping[str, Any], key: str, supplied: Collection[str] = ()
) -> list[str]:
    """Check arguments by name against a signature.

    Args:
        target: What is going to be called.
        node: Argument -> plain value; Hydra's own keys are skipped.
        key: Where the node is.
        supplied: Arguments that somebody else gives.
    """
    named, takes_any = _parameters(target)
    if named is None:
        return []
    given = {str(name): value for name, value in node.items() if name not in _HYDRA_KEYS}
    what = getattr(target, "__name__", str(target))
    problems = []
    hints = _hints(target)
    for name, value in given.items():
        if name in named:
            problems += _check_value(f"{key}.{name}", value, hints.get(name, Any), named[name].default, target)
        elif not takes_any:
            there = [n for n in named if n not in supplied]
            text = ended(f"{key}.{name}={_show(value)}: {what} has no {name!r}{nearest(name, there)}")
            problems.append(f"{text} It takes {listed(there)}")
    if not node.get("_partial_") and "_args_" not in node:
        needed = [n for n, p in named.items() if p.default is p.empty and n not in given and n not in supplied]
        problems += [f"{key}.{name} is missing: {what} needs it ({_expected(hints.get(name, Any))})" for name in needed]
    return problems


def has_argument(target: Callable[..., Any], name: str) -> bool:
    """Whether a call takes an argument of that name, as its signature lists it."""
    return name in (_parameters(target)[0] or ())


def _parameters(target: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter] | None, bool]:
    """Those that can be given by name (``None`` for a builtin), and whether any other can be too."""
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return None, True
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {name: parameter for name, parameter in parameters.items() if parameter.kind in by_name}
    return named, any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _check_value(key: str, value: Any, hint: Any, default: Any, target: Any) -> list[str]:
    if value == MISSING or (default is not inspect.Parameter.empty and value is default):
        return []  # the tree tells of what is missing
    ours = (getattr(target, "__module__", "") or "").startswith("lightning_weightsync")
    if fits(value, hint, strict=ours):
        return []
    choices = _choices(hint)
    hint_text = nearest(value, choices) if choices else ""
    return [f"{key}={_show(value)}: {_expected(hint)} is needed{hint_text}"]


def fits(value: Any, hint: Any, *, strict: bool = True) -> bool:
    """Whether a plain value may be given where an annotation stands; a node that builds something may, anywhere.

    Args:
        value: From YAML.
        hint: The annotation.
        strict: What to say of classes that are none of Python's plain ones: whether plain values are wrong there.
    """
    if isinstance(value, Mapping) and "_target_" in value:
        return True
    origin = get_origin(hint)
    if hint is Any or hint is inspect.Parameter.empty or isinstance(hint, typing.TypeVar | str):
        return True
    if origin in (Union, types.UnionType):
        return any(fits(value, part, strict=strict) for part in get_args(hint))
    if origin is typing.Annotated:
        return fits(value, get_args(hint)[0], strict=strict)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(hint))
    kind = origin or hint
    if kind is None or kind is _NONE:
        return value is None
    if kind is bool:
        return isinstance(value, bool)
    if kind in (int, float):
        number = int if kind is int else (int, float)
        return isinstance(value, number) and not isinstance(value, bool)
    if kind in _STRINGS:
        return isinstance(value, str)
    if kind in _LISTS:
        parts = [part for part in get_args(hint) if part is not Ellipsis]
        return isinstance(value, list) and (
            len(parts) != 1 or all(fits(element, parts[0], strict=strict) for element in value)
        )
    if kind in _MAPPINGS:
        parts = list(get_args(hint))
        return isinstance(value, Mapping) and (
            len(parts) != 2 or all(fits(element, parts[1], strict=strict) for element in value.values())
        )
    return not strict or not isinstance(value, bool | int | float | str | None)


def _choices(hint: Any) -> list[Any]:
    """What a ``Literal`` allows, in whatever union it stands."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [choice for part in get_args(hint) for choice in _choices(part)] if get_origin(hint) is not None else []


def _expected(hint: Any) -> str:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        parts = [part for part in get_args(hint) if part is not int or float not in get_args(hint)]
        return " or ".join(dict.fromkeys(map(_expected, parts)))
    if origin is Literal:
        return f"one of {', '.join(map(repr, get_args(hint)))}"
    kind = origin or hint
    simple: dict[Any, str] = {
        int: "an int",
        float: "a number",
        bool: "true or false",
        _NONE: "null",
        **dict.fromkeys(_STRINGS, "a string"),
        **dict.fromkeys(_LISTS, "a list"),
        **dict.fromkeys(_MAPPINGS, "a mapping"),
        collections.abc.Callable: "a factory (a node with _target_ and _partial_: true, or hydra.utils.get_class)",
        Any: "a value",
    }
    if kind in simple:
        return simple[kind]
    return f"a {getattr(kind, '__name__', kind)} (a node with _target_)"


def _hints(target: Any) -> dict[str, Any]:
    """Annotations of the arguments; one that cannot be read (a name under ``TYPE_CHECKING``) allows all."""
    function: Any = target.func if isinstance(target, partial) else target
    if isinstance(function, type):
        function = function.__dict__.get("__init__") or getattr(function, "__init__")  # noqa: B009 - mypy
    try:
        return typing.get_type_hints(function)
    except Exception:
        pass
    module = inspect.unwrap(function)
    names = getattr(module, "__globals__", {})
    hints = {}
    for name, text in getattr(function, "__annotations__", {}).items():
        try:
            hints[name] = eval(text, names) if isinstance(text, str) else text  # the code's own annotations
        except Exception:
            hints[name] = Any
    return hints


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
