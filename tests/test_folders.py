"""Files are made anew and never through links; what is read is a regular file."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from lockstep.errors import BadLaunch
from lockstep.folders import Folder, new_text, open_named, open_regular, open_to_write
from lockstep.printable import printable


def a_link(path: Path) -> None:
    path.symlink_to(victim_beside(path))


def a_link_to_nothing(path: Path) -> None:
    path.symlink_to(path.parent / "nothing")


def a_hard_link(path: Path) -> None:
    path.hardlink_to(victim_beside(path))


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.close()


def a_folder(path: Path) -> None:
    path.mkdir()


def victim_beside(path: Path) -> Path:
    return path.parent / "victim"


KINDS = [a_link, a_link_to_nothing, a_hard_link, a_pipe, a_socket, a_folder]


@pytest.mark.parametrize("put", KINDS)
def test_what_others_put_there_is_not_written_to(tmp_path: Path, put: Callable) -> None:
    (tmp_path / "victim").write_text("kept")
    put(tmp_path / "name")
    before = sorted(tmp_path.iterdir())
    folder = Folder(tmp_path)
    for write in (
        lambda: folder.new_file("name"),
        lambda: folder.open_lock("name"),
        lambda: open_to_write(tmp_path / "name"),
    ):
        with pytest.raises(OSError, match=r"File exists|It is a|Is a directory") as caught:
            write()
        assert caught.value.filename == str(tmp_path / "name")
    assert (tmp_path / "victim").read_text() == "kept"
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("put", [a_pipe, a_socket, a_folder])
def test_what_is_no_file_is_not_read(tmp_path: Path, put: Callable) -> None:
    put(tmp_path / "name")
    with pytest.raises(OSError, match=r"It is a (pipe|folder), not a file|No such device"):
        Folder(tmp_path).read("name")
    with pytest.raises(OSError, match="It is a device, not a file"):
        open_regular("/dev/zero")


def test_a_folder_within_is_not_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
        Folder(Path("link"), within=Folder(tmp_path))
    Folder(tmp_path / "link").new_file("x").close()  # the user's own path may be one
    assert (tmp_path / "elsewhere" / "x").exists()


def test_a_folder_that_was_renamed_is_told(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    folder = Folder(tmp_path / "a")
    assert folder.is_at_its_path()
    (tmp_path / "a").rename(tmp_path / "b")
    assert not folder.is_at_its_path()
    (tmp_path / "a").mkdir()
    assert not folder.is_at_its_path()
    folder.new_file("x").close()
    assert (tmp_path / "b" / "x").exists()


def test_removing_takes_links_and_not_what_they_lead_to(tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "x").touch()
    (tmp_path / "link").symlink_to("victim")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "link").symlink_to("../victim")
    folder = Folder(tmp_path)
    for name in ("link", "own", "nothing"):
        folder.remove(name)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["victim", "x"]


def test_a_terminal_gets_no_escapes_of_others() -> None:
    assert printable("layer.weight ünï") == "layer.weight ünï"
    assert printable("\x1b[2J\r\n\u202e\udcff[/nope]") == r"\x1b[2J\r\n\u202e\udcff[/nope]"


@pytest.mark.parametrize("put", KINDS)
def test_a_new_text_takes_the_place_of_what_was_there(tmp_path: Path, put: Callable) -> None:
    (tmp_path / "victim").write_text("kept")
    put(tmp_path / "name")
    if put is a_folder:
        with pytest.raises(OSError, match=r"Is a directory|not permitted"):
            new_text(tmp_path / "name")
    else:
        with new_text(tmp_path / "name") as file:
            file.write("new")
        assert (tmp_path / "name").read_text() == "new"
    assert (tmp_path / "victim").read_text() == "kept"


def test_a_name_that_is_taken_from_a_file_meanwhile_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link to the victim is removed between its opening and the look at how many names it has."""
    a_hard_link_of = tmp_path / "name"
    victim_beside(a_hard_link_of).write_text("kept")
    a_hard_link(a_hard_link_of)
    opened, real = os.open, []

    def quick(path: object, flags: int, *args: int, **options: int | None) -> int:
        descriptor = opened(path, flags, *args, **options)
        if flags & os.O_CREAT and not real:
            real.append(descriptor)
            a_hard_link_of.unlink()
        return descriptor

    monkeypatch.setattr(os, "open", quick)
    with pytest.raises(OSError, match=r"No such file|other names"):
        open_to_write(a_hard_link_of)


def test_what_a_user_has_named_may_be_a_link_of_its_own(tmp_path: Path) -> None:
    a_link(tmp_path / "name")
    victim_beside(tmp_path / "name").write_text("kept")
    os.close(open_named(str(tmp_path / "name"), os.O_WRONLY | os.O_APPEND, 0o666))
    if os.geteuid() != 0:
        pytest.skip("only root may make a link of another user")
    os.lchown(tmp_path / "name", 65534, 65534)
    with pytest.raises(OSError, match="It is a link of another user"):
        open_named(str(tmp_path / "name"), os.O_WRONLY | os.O_APPEND, 0o666)


def test_what_a_user_has_named_is_not_another_file_by_a_name_of_others(tmp_path: Path) -> None:
    """In a folder that is this user's alone, nobody else can have linked it."""
    (tmp_path / "other").write_text("of somebody else")
    (tmp_path / "name").hardlink_to(tmp_path / "other")
    tmp_path.chmod(0o755)
    os.close(open_named(str(tmp_path / "name"), os.O_WRONLY | os.O_APPEND, 0o666))
    tmp_path.chmod(0o1777)
    with pytest.raises(OSError, match="other names"):
        open_named(str(tmp_path / "name"), os.O_WRONLY | os.O_APPEND, 0o666)
    (tmp_path / "other").unlink()
    os.close(open_named(str(tmp_path / "name"), os.O_WRONLY | os.O_APPEND, 0o666))


@pytest.mark.parametrize(
    ("path", "kind", "told"),
    [
        ("", ValueError, "is empty"),
        ("run\0", ValueError, "has a NUL"),
        (3, TypeError, "is 3 .int., not a path"),
        (b"run", TypeError, "is b'run' .bytes., not a path"),
    ],
)
def test_what_is_no_path_is_refused_wherever_one_is_given(
    path: Any, kind: type[Exception], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written to the current folder then."""
    monkeypatch.chdir(tmp_path)
    calls: dict[str, Callable[[], object]] = {
        "save": lambda: lockstep.save(path, number=1),
        "load": lambda: lockstep.load(path, number=1),
        "steps": lambda: lockstep.steps(2, path, model=torch.nn.Linear(1, 1)),
        "trace": lambda: lockstep.trace(path).__enter__(),
        "log_to": lambda: lockstep.log_to(path),
        "launch": lambda: lockstep.launch(print, 1, log_dir=path),
    }
    for name, call in calls.items():
        with pytest.raises(BadLaunch if name == "launch" else kind) as found:
            call()
        assert re.search(told, str(found.value))
    assert [*tmp_path.iterdir()] == []
