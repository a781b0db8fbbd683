"""Handwritten digits to train on: from scikit-learn, MNIST, or a folder of images of your own."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.data import partition
from lockstep.errors import MissingExtra

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
