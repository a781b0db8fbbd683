import sys
import types
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lockstep.demo import Digits, load
from lockstep.errors import MissingExtra


def assert_well_formed(digits: Digits, num_train: int, num_test: int) -> None:
    for images, labels, count in (
        (digits.train_images, digits.train_labels, num_train),
        (digits.test_images, digits.test_labels, num_test),
    ):
        assert images.shape == (count, 1, 28, 28)
        assert images.dtype == torch.float32
        assert labels.shape == (count,)
        assert labels.dtype == torch.int64
        assert set(labels.tolist()) <= set(range(10))


def assert_standardised(images: Tensor) -> None:
    std, mean = torch.std_mean(images, correction=0)
    assert mean.item() == pytest.approx(0.0, abs=1e-5)
    assert std.item() == pytest.approx(1.0, abs=1e-5)


# scikit-learn's digits.


@pytest.fixture(scope="module")
def sklearn_datasets() -> types.ModuleType:
    """Imported before a test starts, since scikit-learn sets environment variables as it is."""
    module: types.ModuleType = pytest.importorskip("sklearn.datasets")
    return module


@pytest.mark.usefixtures("sklearn_datasets")
def test_digits_are_1500_to_train_on_and_297_to_test_with() -> None:
    digits = load("digits")
    assert_well_formed(digits, 1500, 297)
    assert_standardised(digits.train_images)
    assert set(digits.test_labels.tolist()) == set(range(10))


def test_digits_are_split_the_same_each_time_and_none_is_in_both(
    sklearn_datasets: types.ModuleType,
) -> None:
    one, other = load("digits"), load("digits")
    assert all(torch.equal(a, b) for a, b in zip(one[:4], other[:4], strict=True))
    labels = torch.cat([one.train_labels, one.test_labels])
    target = torch.tensor(sklearn_datasets.load_digits().target)
    assert torch.equal(labels.bincount(), target.bincount())
    images = torch.cat([one.train_images, one.test_images]).flatten(1)
    assert len(images.unique(dim=0)) == 1797


def test_digits_without_scikit_learn_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtra, match=r"scikit-learn .*'torch-lockstep\[demo\]'"):
        load("digits")


# MNIST, by a stand-in for torchvision with the interface that is used of it.


class StandInMNIST:
    calls: list[tuple[str, bool, bool]]

    def __init__(self, root: str, train: bool, download: bool) -> None:
        self.calls.append((root, train, download))
        self.data = torch.full((6, 28, 28), 255 if train else 0, dtype=torch.uint8)
        self.targets = torch.arange(6)


@pytest.fixture
def mnist(monkeypatch: pytest.MonkeyPatch) -> type[StandInMNIST]:
    StandInMNIST.calls = []
    module = types.ModuleType("torchvision.datasets")
    module.__dict__["MNIST"] = StandInMNIST
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.datasets", module)
    return StandInMNIST


def test_mnist_is_downloaded_to_root_and_normalised(
    mnist: type[StandInMNIST], tmp_path: Path
) -> None:
    root = tmp_path / "cache" / "mnist"
    digits = load("mnist", root=root)
    assert mnist.calls == [(str(root), True, True), (str(root), False, True)]
    assert_well_formed(digits, 6, 6)
    assert digits.train_images.unique().tolist() == pytest.approx([(1 - 0.1307) / 0.3081])
    assert digits.test_images.unique().tolist() == pytest.approx([-0.1307 / 0.3081])


def test_mnist_is_kept_in_torch_hubs_folder_by_default(
    mnist: type[StandInMNIST], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    load("mnist")
    assert mnist.calls[0][0] == str(tmp_path / "datasets")


def test_mnist_without_torchvision_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    with pytest.raises(MissingExtra, match=r"torchvision .*'torch-lockstep\[mnist\]'"):
        load("mnist", root=tmp_path)


# A folder.


def draw(path: Path, grey: int, mode: str = "L", size: tuple[int, int] = (40, 30)) -> None:
    image_module = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    image_module.new("L", size, grey).convert(mode).save(path)


def test_folder_of_images_is_split_and_labelled_by_sub_folder(tmp_path: Path) -> None:
    for label, name in enumerate(["eight", "nine", "seven"]):
        for number in range(4):
            draw(tmp_path / name / f"{number}.png", grey=50 * label)
    (tmp_path / "README.txt").write_text("not a class")
    (tmp_path / ".cache").mkdir()
    digits = load(str(tmp_path))
    assert_well_formed(digits, 10, 2)
    assert_standardised(digits.train_images)
    labels = torch.cat([digits.train_labels, digits.test_labels])
    grey = torch.cat([digits.train_images, digits.test_images]).flatten(1).mean(1)
    assert labels.bincount().tolist() == [4, 4, 4]
    # Each class was drawn in a grey of its own, lighter with each label.
    assert torch.equal(labels, grey.unique(return_inverse=True)[1])


@pytest.mark.parametrize(
    ("name", "mode"), [("a.png", "RGB"), ("a.PNG", "1"), ("a.jpg", "L"), ("a.jpeg", "RGB")]
)
def test_folder_takes_images_of_other_sizes_and_colours(
    tmp_path: Path, name: str, mode: str
) -> None:
    draw(tmp_path / "0" / name, grey=255, mode=mode, size=(5, 90))
    draw(tmp_path / "1" / "b.png", grey=255)
    assert_well_formed(load(str(tmp_path)), 1, 1)


def test_folder_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither 'digits' nor 'mnist', and there is no such fol"):
        load(str(tmp_path / "nothing"))


def test_folder_without_sub_folders_is_an_error(tmp_path: Path) -> None:
    draw(tmp_path / "0.png", grey=0)
    with pytest.raises(ValueError, match=r"no images in .*: it has no sub-folders"):
        load(str(tmp_path))


def test_folder_with_a_class_without_images_is_an_error(tmp_path: Path) -> None:
    draw(tmp_path / "0" / "a.png", grey=0)
    (tmp_path / "1").mkdir()
    with pytest.raises(ValueError, match=r"no images in .*1: no file ends in \.jpeg, \.jpg, \.png"):
        load(str(tmp_path))


def test_folder_with_one_image_is_an_error(tmp_path: Path) -> None:
    draw(tmp_path / "0" / "a.png", grey=0)
    with pytest.raises(ValueError, match=r"one image in .* At least two are needed"):
        load(str(tmp_path))


def test_folder_with_too_many_classes_is_an_error(tmp_path: Path) -> None:
    for label in range(11):
        draw(tmp_path / f"{label:02}" / "a.png", grey=0)
    with pytest.raises(ValueError, match=r"11 classes .* the network can tell 10 apart"):
        load(str(tmp_path))


def test_folder_with_an_unreadable_image_names_it(tmp_path: Path) -> None:
    draw(tmp_path / "0" / "a.png", grey=0)
    whole = (tmp_path / "0" / "a.png").read_bytes()
    for broken in (b"", b"no image", whole[: len(whole) // 2], whole[:40] + b"x" + whole[41:]):
        (tmp_path / "0" / "b.png").write_bytes(broken)
        with pytest.raises(ValueError, match=r"The image .*b\.png can't be read"):
            load(str(tmp_path))


def test_folder_with_an_image_of_another_format_in_disguise_names_it(tmp_path: Path) -> None:
    draw(tmp_path / "0" / "a.png", grey=0)
    draw(tmp_path / "0" / "b.bmp", grey=0)
    (tmp_path / "0" / "b.bmp").rename(tmp_path / "0" / "b.png")
    with pytest.raises(ValueError, match=r"The image .*b\.png can't be read"):
        load(str(tmp_path))


def test_folder_with_an_image_of_16_bits_names_it(tmp_path: Path) -> None:
    draw(tmp_path / "0" / "a.png", grey=0)
    draw(tmp_path / "0" / "b.png", grey=0, mode="I;16")
    with pytest.raises(ValueError, match=r"b\.png can't be read: it has 16 bits per pixel"):
        load(str(tmp_path))


def test_folder_without_pillow_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingExtra, match=r"Pillow .*'torch-lockstep\[demo\]'"):
        load(str(tmp_path))
