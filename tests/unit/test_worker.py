"""What a worker's interpreter does before it is told what to build."""

import importlib.util
import sys

import pytest

from lightning_weightsync.collectors.process import _environment
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


def test_a_worker_does_not_inherit_what_makes_a_process_a_rank(monkeypatch):
    ranks = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED")
    launchers = ("TORCHELASTIC_RUN_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "PMI_RANK")
    for name in (*ranks, *launchers, "OMPI_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK"):
        monkeypatch.setenv(name, "3")
    kept = {"CUDA_VISIBLE_DEVICES": "0", "SLURM_JOB_ID": "17", "SIMULATOR_RANK": "a"}
    for name, value in kept.items():
        monkeypatch.setenv(name, value)
    environment = _environment(threads=2)
    assert "3" not in {value for name, value in environment.items() if "RANK" in name or "SLURM" in name}
    assert not set(ranks) & set(environment)
    assert kept.items() <= environment.items()
    assert environment["OMP_NUM_THREADS"] == "2"
