"""``lockstep demo``: one training loop for any number of ranks, and its images of digits."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lockstep.data import DataLoader, partition
from lockstep.errors import BadLaunch, MissingExtra
from lockstep.launcher import check_num_ranks, launch, whole_number
from lockstep.metrics import reduce
from lockstep.nn import mean, parallelize
from lockstep.optim import shard_optimizer
from lockstep.world import World, init

GLOBAL_BATCH_SIZE = 128
LEARNING_RATE, MOMENTUM = 0.05, 0.9
# Far above the rounding errors of one epoch in float64, and far below the difference of 1e-4 that a
# single sample makes which is lost or counted twice.
TOLERANCE = 1e-9

IMAGE_SIZE = 28
MAX_CLASSES = 10  # outputs of the demo's network

# The split into train and test images is random, with a fixed seed: it is the same on every rank.
_SPLIT_SEED = 1234
_NUM_TEST_DIGITS = 297

# The mean and standard deviation of MNIST's training pixels, from 0 to 1.
_MNIST_MEAN, _MNIST_STD = 0.1307, 0.3081
# One rank downloads 11 MB while the others wait.
_DOWNLOAD_TIMEOUT_SECONDS = 600.0

_SUFFIXES = (".jpeg", ".jpg", ".png")
State = dict[str, Tensor]


def demo(nprocs: str = "2", epochs: str = "15", seed: int = 1234, data: str = "digits") -> bool:
    """Train on ``nprocs`` processes, then show that splitting has changed nothing.

    Returns:
        Whether one more epoch on ``nprocs`` processes and in one gave the same parameters.

    Raises:
        BadLaunch: If a number makes no sense, or there is no such data.
        MissingExtra: If the data needs a package that isn't installed.
    """
    num_ranks = check_num_ranks(nprocs)
    num_epochs = whole_number(epochs, "--epochs", "15 train the network well.")
    if not 0 <= seed < 2**63:
        raise BadLaunch(f"--seed is {seed}, but must be from 0 to 2**63 - 1.")
    if num_ranks > GLOBAL_BATCH_SIZE:
        raise BadLaunch(
            f"--nprocs is {num_ranks}, but a batch of {GLOBAL_BATCH_SIZE} images can't be split "
            f"over more than {GLOBAL_BATCH_SIZE} ranks."
        )
    console = Console(highlight=False)
    try:
        digits = load(data)
    except ValueError as error:
        raise BadLaunch(str(error)) from error
    processes = "one process" if num_ranks == 1 else f"{num_ranks} processes"
    console.print(
        f"Training a ConvNet on {digits.name}: {len(digits.train_labels):,} images to train on, "
        f"{len(digits.test_labels):,} to test with, {GLOBAL_BATCH_SIZE} a step over {processes}."
    )
    start, together = launch(train, num_ranks, (digits, num_epochs, seed), output="plain")[0]
    alone = train_exactly(start, digits, init(device="cpu"), seed)
    difference = largest_difference(together, alone)
    num_parameters = sum(value.numel() for value in alone.values())
    num_batches = math.ceil(len(digits.train_labels) / GLOBAL_BATCH_SIZE)
    verdict = "[green]Nothing was lost by splitting.[/green]"
    if difference >= TOLERANCE:
        verdict = f"[red]It should be below {TOLERANCE:.0e}: please report this.[/red]"
    console.print(
        f"\nOne more epoch from there, dropout off, in float64, on {processes} and "
        f"in one, the same {num_batches} batches: the largest difference in {num_parameters:,} "
        f"parameters is [bold]{difference:.1e}[/bold]. {verdict}"
    )
    return difference < TOLERANCE


class ConvNet(nn.Module):
    """Two convolutions and two linear layers: 21,840 parameters, ten classes.

    Args:
        dropout: The dropout probability of the second convolution's features and of the hidden
            units. Each rank draws for itself, so several ranks compute what one process computes
            on the whole batch only if this is 0.

    Source: ``Net`` of PyTorch's MNIST example, with the same names and shapes of parameters.
    """

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d(dropout)
        self.fc1 = nn.Linear(320, 50)
        self.fc1_drop = nn.Dropout(dropout)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return log-probabilities ``[N, 10]`` for float images ``[N, 1, 28, 28]``."""
        x = F.relu(F.max_pool2d(self.conv1(images), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = self.fc1_drop(F.relu(self.fc1(torch.flatten(x, 1))))
        return F.log_softmax(self.fc2(x), dim=1)


def train(world: World, digits: Digits, epochs: int, seed: int) -> tuple[State, State]:
    """Train on this rank; return the parameters then, and after an epoch without randomness.

    Rank 0 shows the progress and prints each epoch's loss and accuracy, over all ranks.
    """
    torch.manual_seed(seed)
    model = parallelize(ConvNet().to(world.device), process_group=world.process_group)
    torch.manual_seed(seed + world.rank)  # ranks drop out different units
    is_quiet = world.rank != 0
    console = Console(quiet=is_quiet)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=is_quiet, transient=True
    ) as progress:
        loader = loader_of(digits, world, seed)
        bar = progress.add_task("training", total=epochs * len(loader))
        optimizer = _optimizer(model)
        for epoch in range(epochs):
            loss = train_epoch(model, optimizer, loader, world, partial(progress.advance, bar))
            right = accuracy(model, digits, world)
            console.print(f"epoch {epoch + 1:2}  loss {loss:.4f}  accuracy {right:6.2%}")
    start = _copy_of(model)
    return start, train_exactly(start, digits, world, seed)


def train_exactly(start: State, digits: Digits, world: World, seed: int) -> State:
    """Return the parameters after one epoch from ``start``, in float64 and without dropout."""
    model = ConvNet(dropout=0)
    model.load_state_dict(start)
    model = parallelize(model.double().to(world.device), process_group=world.process_group)
    exact = digits._replace(train_images=digits.train_images.double())
    train_epoch(model, _optimizer(model), loader_of(exact, world, seed), world)
    return _copy_of(model)


def largest_difference(one: State, other: State) -> float:
    """The largest absolute difference between two sets of parameters."""
    return max((one[name] - other[name]).abs().max().item() for name in one)


def loader_of(digits: Digits, world: World, seed: int) -> DataLoader[list[Tensor]]:
    """This rank's parts of the global batches, which are the same for any number of ranks."""
    dataset = TensorDataset(digits.train_images, digits.train_labels)
    return DataLoader(
        dataset, GLOBAL_BATCH_SIZE, shuffle=True, seed=seed, process_group=world.process_group
    )


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[list[Tensor]],
    world: World,
    after_step: Callable[[], object] = lambda: None,
) -> float:
    """Take a step for each global batch, and return the mean loss over all samples."""
    model.train()
    total, count = 0.0, 0
    for images, labels in loader:
        optimizer.zero_grad()
        losses = F.nll_loss(
            model(images.to(world.device)), labels.to(world.device), reduction="none"
        )
        loss = mean(losses, process_group=world.process_group)
        loss.backward()
        optimizer.step()
        total += loss.item() * losses.numel()
        count += losses.numel()
        after_step()
    total, count = reduce((total, count), "sum", process_group=world.process_group)
    return total / count


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits, world: World) -> float:
    """The fraction of test images that are classified correctly; each rank takes every n-th."""
    model.eval()
    images = digits.test_images[world.rank :: world.world_size].to(world.device)
    labels = digits.test_labels[world.rank :: world.world_size].to(world.device)
    is_right = model(images).argmax(1) == labels
    return float(mean(is_right.double(), process_group=world.process_group))


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """SGD, its work divided among the ranks where `model` is parallel."""
    sgd = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    return shard_optimizer(sgd)


def _copy_of(model: nn.Module) -> State:
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


class Digits(NamedTuple):
    """Images of digits: ``[N, 1, 28, 28]``, float32, normalised; labels: ``[N]``, int64, 0 to 9."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    name: str  # of the data, in messages


def load(data: str = "digits", *, root: Path | None = None) -> Digits:
    """Load images of digits; every rank that loads the same gets the same, in the same order.

    Args:
        data: One of

            - ``"digits"``: the 1,797 UCI digits that come with scikit-learn, enlarged from 8x8;
              1,500 to train on and 297 to test with.
            - ``"mnist"``: MNIST, 60,000 and 10,000, downloaded once by torchvision.
            - a folder, with a sub-folder of PNG or JPEG images for each class, ten at most. Sorted
              by name, the sub-folders are classes 0, 1, 2, ... The images become grey and 28x28.
              A random sixth of them, one at least, is for the test. ``./digits`` is a folder even
              though ``digits`` isn't.
        root: Where MNIST is kept; by default ``datasets`` in torch.hub's folder, which is
            ``~/.cache/torch/hub`` unless you changed it.

    Raises:
        MissingExtra: If scikit-learn, torchvision or Pillow is needed and isn't installed.
        ValueError: If ``data`` is none of these, or the folder is not as described.
    """
    if data == "digits":
        return _load_digits()
    if data == "mnist":
        return _load_mnist(root or Path(torch.hub.get_dir()) / "datasets")
    return _load_folder(Path(data))


def _load_digits() -> Digits:
    bunch = _require("sklearn.datasets", "scikit-learn", extra="demo").load_digits()
    small = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1)
    images = F.interpolate(small, size=(IMAGE_SIZE, IMAGE_SIZE), mode="bilinear")
    labels = torch.tensor(bunch.target, dtype=torch.int64)
    return _split(images, labels, _NUM_TEST_DIGITS, "scikit-learn's digits")


def _load_mnist(root: Path) -> Digits:
    torchvision_datasets = _require("torchvision.datasets", "torchvision", extra="mnist")
    filelock = _require("filelock", "filelock", extra="mnist")
    root.mkdir(parents=True, exist_ok=True)
    # All ranks of a host load at once, and would spoil each other's files.
    with filelock.FileLock(root / "mnist.lock", timeout=_DOWNLOAD_TIMEOUT_SECONDS):
        train = torchvision_datasets.MNIST(str(root), train=True, download=True)
        test = torchvision_datasets.MNIST(str(root), train=False, download=True)
    images = [(_as_images(part.data) - _MNIST_MEAN) / _MNIST_STD for part in (train, test)]
    return Digits(images[0], train.targets, images[1], test.targets, "MNIST")


def _load_folder(folder: Path) -> Digits:
    if not folder.is_dir():
        raise ValueError(
            f"Data {str(folder)!r} is neither 'digits' nor 'mnist', and there is no such folder."
        )
    image_module = _require("PIL.Image", "Pillow", extra="demo")
    files = _images_by_class(folder)
    labels = torch.tensor([label for label, paths in enumerate(files) for _ in paths])
    if len(labels) < 2:
        raise ValueError(
            f"There is one image in {folder}. At least two are needed: to train on, and to test."
        )
    pixels = [_read_image(path, image_module) for paths in files for path in paths]
    images = _as_images(torch.stack(pixels))
    return _split(images, labels, max(1, len(labels) // 6), f"images in {folder}")


def _images_by_class(folder: Path) -> list[list[Path]]:
    classes = [path for path in _visible(folder) if path.is_dir()]
    if not classes:
        raise ValueError(
            f"There are no images in {folder}: it has no sub-folders. "
            "Put the images of each class into one, such as 0, 1, ..., 9."
        )
    if len(classes) > MAX_CLASSES:
        raise ValueError(
            f"There are {len(classes)} classes (sub-folders) in {folder}, and the network can "
            f"tell {MAX_CLASSES} apart. Leave {len(classes) - MAX_CLASSES} of them out."
        )
    files = [[f for f in _visible(each) if f.suffix.lower() in _SUFFIXES] for each in classes]
    if [] in files:
        raise ValueError(
            f"There are no images in {classes[files.index([])]}: no file ends in "
            f"{', '.join(_SUFFIXES)}. "
            "Put some there, or remove the sub-folder if it is not a class."
        )
    return files


def _visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _read_image(path: Path, image_module: ModuleType) -> Tensor:
    """``[28, 28]`` grey pixels, uint8."""
    try:
        # Pillow looks at a file's content, not at its name: without `formats`, any of its decoders
        # could be given a file that is called PNG.
        with image_module.open(path, formats=("JPEG", "PNG")) as image:
            if image.mode.startswith("I"):  # convert() would clip it to white
                raise ValueError("it has 16 bits per pixel, and 8 are needed")
            grey = image.convert("L").resize((IMAGE_SIZE, IMAGE_SIZE))
    # Pillow raises SyntaxError for a broken PNG, and an error of its own for enormous images.
    except (OSError, SyntaxError, ValueError, image_module.DecompressionBombError) as error:
        raise ValueError(
            f"The image {path} can't be read: {error}. Replace or remove it."
        ) from error
    pixels = torch.frombuffer(bytearray(grey.tobytes()), dtype=torch.uint8)
    return pixels.view(IMAGE_SIZE, IMAGE_SIZE)


def _as_images(pixels: Tensor) -> Tensor:
    """``[N, 28, 28]`` uint8 to ``[N, 1, 28, 28]`` float32 from 0 to 1."""
    return pixels.unsqueeze(1).float() / 255


def _split(images: Tensor, labels: Tensor, num_test: int, name: str) -> Digits:
    whole = range(len(labels))
    train, test = partition(whole, [len(whole) - num_test, num_test], _SPLIT_SEED)
    # Statistics of the training images alone: none of the test images may influence training.
    # Images all of one grey have a standard deviation of 0.
    std, mean = torch.std_mean(images[train.indices], correction=0)
    images = (images - mean.item()) / (std.item() or 1.0)
    parts = [(images[part.indices], labels[part.indices]) for part in (train, test)]
    return Digits(*parts[0], *parts[1], name)


def _require(module: str, package: str, *, extra: str) -> ModuleType:
    """Import ``module``, of a package in an extra of torch-lockstep; may raise MissingExtra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(
            f"{package} is needed for this data and can't be imported ({error}). "
            f"Install it with: pip install 'torch-lockstep[{extra}]'"
        ) from error
