"""Which plain values fit which annotations, and what is told of those that do not."""

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Literal, Optional

import pytest
import torch
from torch import nn

from lightning_weightsync.commands.schema import check_arguments, check_tree, find, fits

NODE = {"_target_": "some.factory"}


@pytest.mark.parametrize(
    ("hint", "fitting", "others"),
    [
        (int, [1, 0, -1], [True, 1.0, "1", None, [1]]),
        (float, [1, 1.5], [True, "1", None]),
        (bool, [True, False], [1, "true", None]),
        (str, ["", "a"], [1, True, None]),
        (int | None, [1, None], ["1", 1.5]),
        (Optional[float], [1, None], ["1"]),  # noqa: UP045 - as others' code has it
        (Literal["a", "b"], ["a"], ["c", 1, None]),
        (Literal[1] | None, [1, None], [True, "1"]),
        (list[int], [[1, 2], []], [["1"], 1, {"a": 1}]),
        (Sequence[str], [["a"]], ["a", [1]]),
        (Mapping[str, str] | None, [{"a": "b"}, None], [{"a": 1}, ["a"]]),
        (dict[str, Any], [{"a": object()}], [[]]),
        (Callable[[], int] | str, ["a", NODE], [1, None]),
        (torch.dtype | None, [None, NODE], ["bfloat16", 1]),
        (nn.Module, [NODE], ["net", 1, None]),
        (Any, [1, "a", None, []], []),
    ],
)
def test_values_fit_annotations_of_their_kind(hint, fitting, others):
    assert all(fits(value, hint) for value in fitting)
    assert not any(fits(value, hint) for value in others)


def test_classes_of_others_may_take_what_we_do_not_know():
    assert not fits("1 day", torch.Generator)
    assert fits("1 day", torch.Generator, strict=False)


def callee(first: int, *, second: "str | None" = None, third: "Unknown" = 3, **rest: float) -> None:  # noqa: F821
    """Has an annotation that cannot be read."""


def strict(first: int, second: float = 1.0) -> None:
    """Takes nothing else."""


def test_arguments_are_checked_against_the_signature():
    assert check_arguments(callee, {"first": 1, "second": "a", "third": object(), "fourth": "anything"}, "node") == []
    assert check_arguments(callee, {}, "node") == ["node.first is missing: callee needs it (an int)"]
    assert check_arguments(callee, {}, "node", {"first"}) == []
    assert check_arguments(callee, {"_partial_": True}, "node") == []
    (problem,) = check_arguments(callee, {"first": "a"}, "node")
    assert problem == "node.first='a': an int is needed"
    (problem,) = check_arguments(strict, {"first": 1, "secnd": 2}, "node")
    assert problem == "node.secnd=2: strict has no 'secnd'; did you mean 'second'? It takes first, second"


def test_every_node_of_a_tree_is_looked_at_and_every_problem_told():
    tree = {
        "one": {"_target_": f"{__name__}.strict", "first": "a"},
        "list": [{"_target_": f"{__name__}.nothing"}, "???"],
        "deep": {"er": {"_target_": 3}},
    }
    problems = check_tree(tree, "", {})
    assert [problem.split("=")[0].split(" ")[0] for problem in problems] == [
        "one.first",
        "list[0]._target_",
        "list[1]",
        "deep.er._target_",
    ]


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (Path, "a string"),
        (Path | None, "a string or null"),
        (Iterable[str], "a list"),
        (tuple[int, int], "a list"),
        (set, "a list"),
        (MutableMapping[str, int], "a mapping"),
    ],
)
def test_what_is_needed_is_what_would_fit(hint, expected):
    def callee(value: hint) -> None:
        """Takes that."""

    assert check_arguments(callee, {"value": 3}, "node") == [f"node.value=3: {expected} is needed"]
    plain = {"a string": "a", "a string or null": None, "a list": [], "a mapping": {}}[expected]
    assert fits(plain, hint)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torch.nn.Linaer", "torch.nn has no 'Linaer'; did you mean 'Linear'?"),
        ("no_such_package.Thing", "there is no module 'no_such_package'"),
        ("torch..nn", "a dotted name is needed"),
    ],
)
def test_a_name_that_leads_nowhere_is_told_with_what_is_there(name, message):
    found, problem = find(name, "key")
    assert found is None and problem.startswith(f"key={name!r}") and message in problem


def test_a_module_that_raises_when_it_is_imported_says_what(tmp_path, monkeypatch):
    (tmp_path / "raises_on_import.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    found, problem = find("raises_on_import.Thing", "key")
    assert found is None and "importing raises_on_import raised ZeroDivisionError" in problem
