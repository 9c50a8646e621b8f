"""`elche.launch` from a notebook's cells."""

from __future__ import annotations

import nbclient
import nbformat
import pytest

CELLS = (
    """
import torch
from torch.utils.data import DataLoader, TensorDataset

import elche

torch.set_num_threads(2)
(torch.randn(800, 800) @ torch.randn(800, 800)).sum()  # threads that no fork has
""",
    """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.line(x)


torch.manual_seed(0)
x = torch.randn(32, 4)


def train(learning_rate):
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    model, optimizer, loader = elche.setup(
        model, optimizer, DataLoader(data, batch_size=8, num_workers=1)
    )
    for inputs, targets in loader:
        optimizer.zero_grad()
        ((model(inputs) - targets) ** 2).mean().backward()
        optimizer.step()
    print("rank", elche.rank(), "of", elche.world_size())
    return model
""",
    "together = elche.launch(train, speeds=[1, 0.3], args=(0.1,))",
    """
alone = train(0.1)
for one, other in zip(alone.parameters(), together.parameters()):
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
print("equal")
""",
    """
def fails():
    if elche.rank() == 1:
        raise KeyError("no such thing")


elche.launch(fails, 2)
""",
)


def _text(cell: nbformat.NotebookNode) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


@pytest.mark.filterwarnings("ignore")
def test_a_notebook() -> None:
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS]
    client = nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3")
    with pytest.raises(nbclient.exceptions.CellExecutionError) as caught:
        client.execute()
    assert "rank 1 failed: KeyError: 'no such thing'" in str(caught.value)
    lines = _text(notebook.cells[2]).splitlines()
    assert [line for line in lines if "rank" in line][:2] in (
        ["rank 0 of 2", "rank 1 of 2"],
        ["rank 1 of 2", "rank 0 of 2"],
    )
    assert any("unequal" in line for line in lines)
    assert _text(notebook.cells[3]).splitlines()[-1] == "equal"
