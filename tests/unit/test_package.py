import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_weightsync

ROOT = Path(__file__).parents[2]


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys, lightning_weightsync\n"
        "for package in ('schemes', 'transports', 'collectors', 'integrations', 'configs'):\n"
        "    __import__(f'lightning_weightsync.{package}')\n"
        "assert 'UpdateWeights' in dir(lightning_weightsync)\n"
        "print(*sorted({'torch', 'lightning', 'hydra', 'tensordict', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout.strip()) == (0, ""), result.stderr


@pytest.mark.parametrize("name", sorted(set(lightning_weightsync.__all__) - {"__version__"}))
def test_every_public_name_is_what_its_module_defines(name):
    value = getattr(lightning_weightsync, name)
    assert value is getattr(importlib.import_module(value.__module__), name)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'UpdateWeight'"):
        lightning_weightsync.UpdateWeight  # noqa: B018


def test_the_version_is_that_of_the_project():
    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert declared is not None
    assert declared[1] == lightning_weightsync.__version__
