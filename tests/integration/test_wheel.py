"""As a new user would: the built wheel in a new environment, an empty folder, the template, and no repository."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULE = """
import lightning.pytorch as pl
import torch
from torch import nn


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, td):
        td["action"] = torch.distributions.Categorical(logits=self.net(td["observation"])).sample()
        return td


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.actor = Policy()

    def training_step(self, batch, batch_idx):
        logits = self.actor.net(batch["observation"])
        return nn.functional.cross_entropy(logits.flatten(0, -2), batch["action"].flatten())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
"""


def site_packages():
    """Where the packages are that the wheel needs: they are not fetched anew."""
    import hydra
    import matplotlib
    import torch

    return list(dict.fromkeys(str(Path(module.__file__).parents[1]) for module in (torch, hydra, matplotlib)))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_from_the_wheel_to_the_report_in_an_empty_folder(tmp_path):
    pytest.importorskip("matplotlib")
    built = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path / "dist", ROOT]
    subprocess.run(built, check=True, timeout=120)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", wheel], check=True, timeout=120)
    (own,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    # Not the repository, which an editable install would put there.
    (own / "needed.pth").write_text("\n".join(site_packages()) + "\n")
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "mine.py").write_text(MODULE)
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def command(*arguments):
        executable = tmp_path / "env" / "bin" / "lightning-weightsync"
        done = subprocess.run(
            [executable, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where = "import lightning_weightsync; print(lightning_weightsync.__file__)"
    found = subprocess.run([python, "-c", where], cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    assert found.stdout.startswith(str(own))
    command("template", "my.yaml")
    filled = (folder / "my.yaml").read_text()
    for key, value in (
        ("_target_: ??? ", "_target_: mine.Module "),
        ("env: ??? ", "env: CartPole-v1 "),
        ("path: ??? ", "path: mine.Policy "),
        ("policy: ??? ", "policy: actor "),
        ("frames_per_batch: 1024", "frames_per_batch: 64"),
        ("max_epochs: 10", "max_epochs: 2"),
    ):
        assert key in filled, key
        filled = filled.replace(key, value)
    (folder / "my.yaml").write_text(filled)
    assert command("check", "my.yaml").splitlines()[-1] == "ok"
    told = command("my.yaml", "hydra.run.dir=run").splitlines()
    assert told[-1].startswith("finished frames=2560 ") and "version=20" in told[-1]
    assert command("report", "run").strip() == "run/report.html"
    assert (folder / "run" / "report.html").read_text().count("<img") == 6
