"""First lines of scripts: download once, run a module, launch from standard input."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.printing import environment_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]

MODULE = """
import sys, torch, elche
for name in sys.argv[1:]:
    if elche.is_main_process():
        open(name, "x").close()
    elche.barrier()
    open(name).close()
torch.distributed.init_process_group("gloo")
elche.init_group()
rank = elche.rank()
model = elche.DistributedDataParallel(torch.nn.Linear(1, 1))
model(torch.full((1 + rank, 1), 3.0 * rank)).mean().backward()
mean = model.module.weight.grad.item()  # over three samples, of which one is 0
elche.barrier()
torch.distributed.destroy_process_group()
# One write: ranks share the terminal.
sys.stdout.write(f"{__package__} {rank} {elche.world_size()} {mean:.3f}\\n")
"""
FUNCTION = """
import elche
def main(n):
    return elche.world_size() * n
print(elche.launch(main, 2, args=(3,)))
"""


def _python(folder: Path, command: str, text: str = "") -> str:
    words = [sys.executable, *command.split()]
    return subprocess.check_output(
        words, input=text, cwd=folder, text=True, timeout=150, env=environment_of()
    )


@pytest.mark.parametrize(
    "launcher", ["elche run --nproc 2", "torch.distributed.run --nproc-per-node 2"]
)
def test_a_module_waits_for_rank_0_before_the_run(
    tmp_path: Path, launcher: str
) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "train.py").write_text(MODULE)
    output = _python(tmp_path, f"-m {launcher} -m pack.train one two")
    assert sorted(output.splitlines()) == ["pack 0 2 2.000", "pack 1 2 2.000"]


def test_launch_from_standard_input(tmp_path: Path) -> None:
    assert _python(tmp_path, "-", FUNCTION) == "6\n"
