"""Which packages are fit? What the package's own metadata says, extras included, is what is looked for."""

from importlib import metadata

import pytest

from lightning_weightsync.commands import doctor


def packages(monkeypatch, **installed):
    def version(name):
        if installed.get(name, "99.0") is None:
            raise metadata.PackageNotFoundError(name)
        return installed.get(name, "99.0")

    monkeypatch.setattr(metadata, "version", version)
    return {finding.what: finding for finding in doctor._packages()}


def test_every_dependency_is_looked_at_and_those_of_the_extras_too(monkeypatch):
    found = packages(monkeypatch)
    assert list(found)[-3:] == ["gymnasium", "torchrl", "matplotlib"]
    assert {"torch", "tensordict", "lightning", "hydra-core", "omegaconf", "cloudpickle"} <= set(found)
    assert not {"mypy", "pytest", "mkdocs-material"} & set(found)
    assert {finding.level for finding in found.values()} == {"ok"}


def test_what_is_too_old_is_bad_in_an_extra_too(monkeypatch):
    found = packages(monkeypatch, torch="2.8.1+cpu", gymnasium="1.0.9", tensordict="0.9.1")
    assert [finding.what for finding in found.values() if finding.level == "BAD"] == [
        "tensordict",
        "torch",
        "gymnasium",
    ]
    assert found["torch"].mend == "pip install -U 'torch>=2.9'"


def test_what_is_missing_is_bad_unless_it_is_an_extra(monkeypatch):
    found = packages(monkeypatch, torchrl=None, omegaconf=None)
    assert (found["omegaconf"].level, found["omegaconf"].mend) == ("BAD", "pip install 'omegaconf>=2.3'")
    assert (found["torchrl"].level, found["torchrl"].mend) == (
        "note",
        "pip install 'lightning-weightsync[torchrl]', if needed",
    )


@pytest.mark.parametrize("release", ["2.6.2", "2.6.3"])
def test_a_malicious_release_is_told_as_one(monkeypatch, release):
    finding = packages(monkeypatch, lightning=release)["lightning"]
    assert finding.level == "BAD" and "malicious" in finding.found and "rotate the credentials" in finding.found
    assert "!=2.6.2" in finding.mend
    assert packages(monkeypatch, lightning="2.6.4")["lightning"].level == "ok"


def test_a_source_tree_that_is_not_installed_is_a_note(monkeypatch):
    def requires(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    (finding,) = doctor._packages()
    assert finding.level == "note" and "itself is not installed" in finding.found
