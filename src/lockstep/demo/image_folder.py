"""A folder of images, one sub-folder per class, as tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from lockstep.demo.extras import require

MAX_CLASSES = 10  # as many as the demo's network tells apart
_SUFFIXES = (".jpeg", ".jpg", ".png")


def read_image_folder(folder: Path, *, image_size: int) -> tuple[Tensor, Tensor]:
    """Read every image of every class.

    Args:
        folder: It has one sub-folder per class, and in that the class's PNG or JPEG files. What
            else lies about, and what is hidden, is passed over.
        image_size: The height and width to which each image is resized.

    Returns:
        ``[N, image_size, image_size]`` grey pixels, uint8, and ``[N]`` labels, int64: the place
        of the sub-folder among its sorted neighbours. Both in the order of the file names.

    Raises:
        MissingExtra: If Pillow isn't installed.
        ValueError: If there are no classes or more than ten, a class has no images, there are
            fewer than two images, or one can't be read.
    """
    read = _image_reader(image_size)
    files = [
        (path, label)
        for label, class_folder in enumerate(_class_folders(folder))
        for path in _image_files(class_folder)
    ]
    if len(files) < 2:
        raise ValueError(
            f"There is one image in {folder}. At least two are needed: to train on, and to test."
        )
    pixels = torch.stack([read(path) for path, _ in files])
    return pixels, torch.tensor([label for _, label in files])


def _class_folders(folder: Path) -> list[Path]:
    folders = sorted(path for path in _visible(folder) if path.is_dir())
    if not folders:
        raise ValueError(
            f"There are no images in {folder}: it has no sub-folders. "
            "Put the images of each class into one, such as 0, 1, ..., 9."
        )
    if len(folders) > MAX_CLASSES:
        raise ValueError(
            f"There are {len(folders)} classes (sub-folders) in {folder}, and the network can "
            f"tell {MAX_CLASSES} apart. Leave {len(folders) - MAX_CLASSES} of them out."
        )
    return folders


def _image_files(class_folder: Path) -> list[Path]:
    files = sorted(path for path in _visible(class_folder) if path.suffix.lower() in _SUFFIXES)
    if not files:
        raise ValueError(
            f"There are no images in {class_folder}: no file ends in {', '.join(_SUFFIXES)}. "
            "Put some there, or remove the sub-folder if it is not a class."
        )
    return files


def _visible(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.name.startswith(".")]


def _image_reader(image_size: int) -> Callable[[Path], Tensor]:
    image_module = require("PIL.Image", "Pillow", extra="demo")

    def read(path: Path) -> Tensor:
        try:
            # The formats are given since Pillow goes by content: a file that only calls itself
            # PNG would otherwise reach any of its decoders.
            with image_module.open(path, formats=("JPEG", "PNG")) as image:
                if image.mode.startswith("I"):  # convert() would clip them: all of it white
                    raise ValueError("it has 16 bits per pixel, and 8 are needed")
                grey = image.convert("L").resize((image_size, image_size))
        # Pillow says SyntaxError for a PNG gone wrong, and has an error of its own for images
        # of absurd size.
        except (OSError, SyntaxError, ValueError, image_module.DecompressionBombError) as error:
            raise ValueError(
                f"The image {path} can't be read: {error}. Replace or remove it."
            ) from error
        pixels = torch.frombuffer(bytearray(grey.tobytes()), dtype=torch.uint8)
        return pixels.view(image_size, image_size)

    return read
