"""What a worker's interpreter does before it is told what to build."""

import importlib.util
import sys

import pytest

from lightning_weightsync.collectors.worker import _settle_what_is_absent


def test_a_module_that_is_not_installed_is_settled_to_be_absent(monkeypatch):
    monkeypatch.delitem(sys.modules, "not_installed_anywhere", raising=False)
    _settle_what_is_absent("not_installed_anywhere")
    monkeypatch.setattr(sys, "meta_path", [])  # nobody is asked any more
    assert importlib.util.find_spec("not_installed_anywhere") is None
    with pytest.raises(ModuleNotFoundError):
        import not_installed_anywhere  # noqa: F401
    monkeypatch.delitem(sys.modules, "not_installed_anywhere")


def test_a_module_that_is_installed_can_be_imported_as_before(monkeypatch):
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    _settle_what_is_absent("wave")
    import wave

    assert wave.__name__ == "wave"
