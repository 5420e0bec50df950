"""What the documentation shows is run as it stands."""

import re
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


def snippet(document, heading):
    """The first Python block under a heading."""
    text = (ROOT / "docs" / document).read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    return re.search(r"```python\n(.+?)```", text, re.DOTALL)[1]


def test_a_collector_of_ones_own_in_thirty_lines():
    code = snippet("collectors.md", "Your own collector")
    assert code.partition("\nif __name__")[0].count("\n") < 30
    names = {"__name__": "__main__"}
    exec(compile(code, "docs/collectors.md", "exec"), names)
    batch, group = names["batch"], names["group"]
    assert batch.batch_size == (128,) and group.version == 3 and not group.running
    assert batch["policy_version"].eq(2).all()
    assert batch["worker_idx"].tolist() == [0] * 64 + [1] * 64
    assert not torch.equal(batch["observation"][:64], batch["observation"][64:])
    torch.testing.assert_close(batch["action"], names["net"](batch["observation"]).detach(), rtol=0, atol=1e-6)
