"""What works where no extra is installed: all but what names the extra that it takes.

    python tests/without_extras.py

Run by ``tests/stranger.py``, in an environment that has what ``pip install torch-lockstep``
installs, and nothing else.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

EXTRA = re.compile(r"pip install 'torch-lockstep\[(\w+)\]'")
# Each is for users of one library, which has no extra of its own.
INTEGRATIONS = {"lockstep.integrations.fabric", "lockstep.integrations.lightning"}
OF_EXTRAS = ("numpy", "PIL", "sklearn", "torchvision", "mpi4py", "safetensors")
# What needs an extra, and which.
COMMANDS = {
    "run --help": "",
    "explain --help": "",
    "report --help": "",
    "status --help": "",
    "doctor --help": "",
    "demo --help": "",
    "bench --help": "",
    "help --help": "",
    "show --help": "",
    "export --help": "",
    "demo": "demo",
    "demo --data mnist": "mnist",
    "export checkpoint model.safetensors": "safetensors",
}

TRAINING = """
    import torch
    import lockstep

    world = lockstep.init()
    model = lockstep.parallelize(torch.nn.Linear(4, 1))
    optimizer = lockstep.shard_optimizer(torch.optim.AdamW(model.parameters()))
    for x, y in lockstep.DataLoader([(torch.ones(4) * n, torch.ones(1)) for n in range(16)], 4):
        lockstep.mean((model(x) - y).square()).backward()
        lockstep.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    lockstep.save("checkpoint", model=model, optimizer=optimizer)
    print("trained", world.rank)
"""


def check_what_is_installed() -> None:
    """Raise if what extras install is there."""
    there = [name for name in OF_EXTRAS if importlib.util.find_spec(name) is not None]
    assert not there, f"this environment has {there}"


def check_imports() -> None:
    """Import each module, and find each public name."""
    import lockstep

    for name in lockstep.__all__:
        getattr(lockstep, name)
    for module in pkgutil.walk_packages(lockstep.__path__, "lockstep."):
        if module.name not in {*INTEGRATIONS, "lockstep.__main__"}:
            found = importlib.import_module(module.name)
            for name in getattr(found, "__all__", ()):
                getattr(found, name)


def said(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """What a command of lockstep says, and how it ends."""
    words = [str(Path(sys.executable).parent / "lockstep"), *command]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120)


def check_commands(folder: Path) -> None:
    """Train on two ranks; call each command, which works or names the extra that it takes."""
    (folder / "train.py").write_text(textwrap.dedent(TRAINING))
    run = said(folder, "run", "-n", "2", "train.py")
    assert "trained" in run.stdout, run.stdout + run.stderr
    assert run.returncode == 0, run.stderr
    for command, extra in COMMANDS.items():
        done = said(folder, *command.split())
        named = EXTRA.search(done.stdout + done.stderr)
        fine = named is not None and named[1] == extra if extra else done.returncode == 0
        assert fine, f"lockstep {command}: {done.returncode}\n{done.stdout}{done.stderr}"
        print(f"lockstep {command}: {f'names {extra}' if extra else 'works'}", flush=True)


def main() -> None:
    """Check all of it."""
    check_what_is_installed()
    check_imports()
    with tempfile.TemporaryDirectory() as folder:
        check_commands(Path(folder))


if __name__ == "__main__":
    main()
