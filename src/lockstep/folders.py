"""Folders in which other users may put links, pipes and files of theirs; and files in them.

Whoever may write to a folder can put a link where we are about to write, to a file of ours that is
elsewhere. So a file is made anew, and never through a link; and what is read is a regular file, as
a pipe would keep its reader for ever. The path of a folder is its user's: that may be a link.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TextIO

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)  # or no more of it for this user
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def path_given(name: str, value: object, example: str) -> str:
    """``value``, which is given as ``name``, as the path of a file or folder.

    Raises:
        TypeError: If it is neither text nor a Path.
        ValueError: If it is empty, or no path may be called that.
    """
    if not isinstance(value, str | os.PathLike) or not isinstance(text := os.fspath(value), str):
        wanted = f"a path, such as {example!r}"
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}), not {wanted}.")
    if not text:
        raise ValueError(f"{name} is empty. Give a path, such as {example!r}.")
    if "\0" in text:
        raise ValueError(f"{name} is {text!r}, and no path has a NUL. Give one without.")
    return text


class Folder:
    """An open folder. It stays this one if its path gets to be that of another.

    Args:
        path: Its path; or its name, in the folder ``within``, where it may not be a link.
        within: The folder around it.

    Raises:
        OSError: If there is none.
    """

    def __init__(self, path: Path, within: Folder | None = None) -> None:
        self.path, flags = path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        self._descriptor = -1
        if within is not None:
            self.path = within.path / path
            self._descriptor = os.open(path, flags | os.O_NOFOLLOW, dir_fd=within._descriptor)
        else:
            self._descriptor = os.open(path, flags)

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def is_at_its_path(self) -> bool:
        """Whether its path leads to it, which it doesn't if it was renamed or removed."""
        try:
            there = os.stat(self.path)
        except OSError:
            return False
        return os.path.samestat(there, os.fstat(self._descriptor))

    def names(self) -> list[str]:
        """The names in it."""
        return os.listdir(self._descriptor)

    def has(self, name: str) -> bool:
        """Whether there is something of this name, be it a link that leads nowhere."""
        return os.access(name, os.F_OK, dir_fd=self._descriptor, follow_symlinks=False)

    def make(self, name: str) -> None:
        """Make a folder in it."""
        with _naming(self.path / name):
            os.mkdir(name, dir_fd=self._descriptor)

    def new_file(self, name: str) -> BinaryIO:
        """Make a file to write to, where there was nothing."""
        with _naming(self.path / name):
            return os.fdopen(os.open(name, _NEW, 0o666, dir_fd=self._descriptor), "wb")

    def open_file(self, name: str) -> int:
        """Return the descriptor of a regular file, to read; the file may be behind a link."""
        with _naming(self.path / name):
            return open_regular(name, dir_fd=self._descriptor)

    def read(self, name: str) -> bytearray:
        """Return the bytes of a file of text, without zeros: a hole takes memory, but no disk."""
        with _naming(self.path / name), os.fdopen(self.open_file(name), "rb") as file:
            found = bytearray()
            while chunk := file.read(1 << 20):
                if b"\0" in chunk:
                    raise OSError(errno.EINVAL, "It has zeros, which text has not")
                found += chunk
            return found

    def open_lock(self, name: str) -> int:
        """Return the descriptor of a file to lock, and to write to; it is made if need be.

        Raises:
            OSError: If it is a link, not a regular file, or has other names, behind any of which
                may be a file that nobody meant to overwrite.
        """
        with _naming(self.path / name):
            return open_to_write(name, os.O_RDWR, dir_fd=self._descriptor)

    def rename(self, name: str, to: str) -> None:
        """Rename what is in it; a link, not what it leads to."""
        with _naming(self.path / to):
            ours = self._descriptor
            os.rename(name, to, src_dir_fd=ours, dst_dir_fd=ours)

    def remove(self, name: str) -> None:
        """Remove a file or link, or a folder with all in it; what can't be removed is left."""
        with suppress(OSError):
            if stat.S_ISDIR(os.stat(name, dir_fd=self._descriptor, follow_symlinks=False).st_mode):
                shutil.rmtree(name, ignore_errors=True, dir_fd=self._descriptor)
            else:
                os.unlink(name, dir_fd=self._descriptor)

    def sync(self) -> None:
        """Wait until the names in it are on the disk."""
        with _naming(self.path):
            os.fsync(self._descriptor)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Let errors name the whole path; those of a folder's descriptor name what is in it alone."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


def open_regular(path: str | Path, *, dir_fd: int | None = None) -> int:
    """Return the descriptor of a regular file, to read.

    Raises:
        OSError: If it can't be opened, or is a pipe, a device, a socket or a folder.
    """
    # A pipe is opened without waiting for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        _checked_regular(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_to_write(path: str | Path, flags: int = os.O_WRONLY, *, dir_fd: int | None = None) -> int:
    """Return the descriptor of a file to write to, which has what it had; it is made if need be.

    Raises:
        OSError: If it can't be opened, is a link, no regular file, or has other names too: behind
            those may be a file that nobody meant to overwrite.
    """
    flags |= os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o666, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "It is a link, to a file elsewhere", str(path)) from error
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "It is a pipe or a socket, not a file", str(path)) from error
        raise
    try:
        _checked_regular(descriptor)
        # Asked by its name, as this may have been taken from it since it was opened: a file that
        # has this name, and no more than one, has no other.
        named = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
        if named.st_nlink != 1 or not os.path.samestat(named, os.fstat(descriptor)):
            raise OSError(errno.EMLINK, "It is a file that has other names too", str(path))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_named(path: str, flags: int, mode: int) -> int:
    """Open what a user has named, which may be a link of this user's or of root's.

    Raises:
        OSError: If it can't be opened, is a link of another user's, or has other names too and is
            where others may have given it this one.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        if _may_be_named_by_others(path, descriptor):
            os.close(descriptor)
            raise OSError(errno.EMLINK, "It is a file that has other names too", path)
        return descriptor
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
    link = os.open(path, os.O_PATH | os.O_NOFOLLOW)
    try:
        if os.fstat(link).st_uid not in (0, os.geteuid()):
            raise OSError(errno.ELOOP, "It is a link of another user, to a file elsewhere", path)
        target = os.path.join(os.path.dirname(path), os.readlink("", dir_fd=link))
    finally:
        os.close(link)
    return os.open(target, flags | os.O_CLOEXEC, mode)


def _may_be_named_by_others(path: str, descriptor: int) -> bool:
    found, folder = os.fstat(descriptor), os.stat(os.path.dirname(path) or ".")
    is_others = folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or folder.st_uid != os.geteuid()
    return stat.S_ISREG(found.st_mode) and found.st_nlink > 1 and bool(is_others)


def new_text(path: Path) -> TextIO:
    """Open a new file for text, in place of a file or link that was there; lines end in a newline.

    Raises:
        OSError: If it can't be made; a folder there is left.
    """
    with suppress(FileNotFoundError):
        path.unlink()
    return open(path, "x", newline="", encoding="utf-8")


def _checked_regular(descriptor: int) -> os.stat_result:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, f"It is {_what_is(found.st_mode)}, not a file")
    return found


def _what_is(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")
