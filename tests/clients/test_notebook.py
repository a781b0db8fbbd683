"""A notebook, whose cells define what the ranks run."""

from __future__ import annotations

from tests.clients.forks import Forks

CELLS = (
    "import copy, torch, torch.nn.functional as F, lockstep\nfrom torch import nn",
    """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()

    def forward(self, x):
        return self.layers(x)

x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
y = torch.randint(3, (24,), generator=torch.Generator().manual_seed(2))
""",
    """
def train(rank, size, model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch, labels in zip(x.split(8), y.split(8)):
        losses = F.cross_entropy(model(batch[rank::size]), labels[rank::size], reduction="none")
        lockstep.mean(losses).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]

# Ranks that are threads draw from the same random numbers, so no rank draws its own.
start = Net()

def on_each_rank(world):
    nets = copy.deepcopy(start), copy.deepcopy(start)
    models = lockstep.parallelize(nets[0]), lockstep.DistributedDataParallel(nets[1])
    return [train(world.rank, world.world_size, model) for model in models]

alone = train(0, 1, copy.deepcopy(start))
""",
    """
for ranks in "processes", "threads":
    for results in lockstep.launch(on_each_rank, nprocs=2, ranks=ranks):
        for result in results:
            torch.testing.assert_close(result, alone, rtol=1e-9, atol=1e-11)
print("all equal")
""",
    """
def fails(world):
    if world.rank == 1:
        raise KeyError("what went wrong")
    torch.distributed.barrier()

try:
    lockstep.launch(fails, nprocs=2)
except lockstep.errors.RankFailed as error:
    print("told:", "what went wrong" in str(error))
""",
)


def run_notebook() -> list[str]:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(text) for text in CELLS]
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    return [output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ())]


def test_a_notebooks_functions_run_on_ranks(forks: Forks) -> None:
    (outputs,) = forks.run(run_notebook, 1)
    assert "all equal" in "".join(outputs)
    assert "told: True" in "".join(outputs)
