"""Handwritten digits to train on: from scikit-learn, MNIST, or a folder of images of your own."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.data import partition
from lockstep.demo.extras import require
from lockstep.demo.image_folder import read_image_folder

IMAGE_SIZE = 28

# Where the split into train and test is ours to make, this seed makes it the same everywhere.
_SPLIT_SEED = 1234
_NUM_DIGITS_FOR_TEST = 297

# The mean and standard deviation of MNIST's training pixels, from 0 to 1.
_MNIST_MEAN, _MNIST_STD = 0.1307, 0.3081
# One rank downloads, the others wait: 11 MB, on a slow line.
_DOWNLOAD_TIMEOUT_SECONDS = 600.0


class Digits(NamedTuple):
    """Images of digits, to train on and to test with.

    Attributes:
        train_images: ``[N, 1, 28, 28]``, float32, normalised.
        train_labels: ``[N]``, int64, from 0 to 9.
        test_images: As ``train_images``.
        test_labels: As ``train_labels``.
        name: What they are, in words.
    """

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    name: str


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
    sklearn_datasets = require("sklearn.datasets", "scikit-learn", extra="demo")
    bunch = sklearn_datasets.load_digits()
    small = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1)
    images = F.interpolate(small, size=(IMAGE_SIZE, IMAGE_SIZE), mode="bilinear")
    labels = torch.tensor(bunch.target, dtype=torch.int64)
    return _split(images, labels, _NUM_DIGITS_FOR_TEST, "scikit-learn's digits")


def _load_mnist(root: Path) -> Digits:
    torchvision_datasets = require("torchvision.datasets", "torchvision", extra="mnist")
    filelock = require("filelock", "filelock", extra="mnist")
    root.mkdir(parents=True, exist_ok=True)
    # All ranks of a host come here at once; writing the same files, they would spoil them.
    with filelock.FileLock(root / "mnist.lock", timeout=_DOWNLOAD_TIMEOUT_SECONDS):
        train, test = (
            torchvision_datasets.MNIST(str(root), train=is_train, download=True)
            for is_train in (True, False)
        )
    return Digits(
        train_images=_normalise(_as_images(train.data), _MNIST_MEAN, _MNIST_STD),
        train_labels=train.targets,
        test_images=_normalise(_as_images(test.data), _MNIST_MEAN, _MNIST_STD),
        test_labels=test.targets,
        name="MNIST",
    )


def _load_folder(folder: Path) -> Digits:
    if not folder.is_dir():
        raise ValueError(
            f"Data {str(folder)!r} is neither 'digits' nor 'mnist', and there is no such folder."
        )
    pixels, labels = read_image_folder(folder, image_size=IMAGE_SIZE)
    num_test = max(1, len(labels) // 6)
    return _split(_as_images(pixels), labels, num_test, f"images in {folder}")


def _as_images(pixels: Tensor) -> Tensor:
    """``[N, 28, 28]`` uint8 to ``[N, 1, 28, 28]`` float32 from 0 to 1."""
    return pixels.unsqueeze(1).float() / 255


def _normalise(images: Tensor, mean: float, std: float) -> Tensor:
    return (images - mean) / std


def _split(images: Tensor, labels: Tensor, num_test: int, name: str) -> Digits:
    whole = range(len(labels))
    train, test = partition(whole, [len(whole) - num_test, num_test], _SPLIT_SEED)
    # Of the training images alone: what is known of the test is not to be trained on. Images
    # all of one grey have no deviation to divide by.
    std, mean = torch.std_mean(images[train.indices], correction=0)
    images = _normalise(images, mean.item(), std.item() or 1.0)
    return Digits(
        train_images=images[train.indices],
        train_labels=labels[train.indices],
        test_images=images[test.indices],
        test_labels=labels[test.indices],
        name=name,
    )
