"""The traceback of a rank's exception: in full, and folded to what the user wrote."""

from __future__ import annotations

import os
import traceback
from traceback import FrameSummary, TracebackException
from types import TracebackType
from typing import NamedTuple

from lockstep import errors

_PYTHON = os.path.dirname(os.__file__) + os.sep
_PACKAGE = os.path.dirname(errors.__file__) + os.sep
_START = ("<frozen importlib", "<frozen runpy>", os.path.dirname(__file__) + os.sep)


class Told(NamedTuple):
    """An exception in words.

    Attributes:
        full: The traceback as Python would print it had the launcher not been there.
        folded: The same without the frames of lockstep, torch and Python, and without exceptions
            that only these raised and handled: the last one has the words for a user.
        error: The first line of what the exception itself says.
    """

    full: str
    folded: str
    error: str


def tell(error: BaseException, hint: str) -> Told:
    """Put ``error`` into words; ``hint`` says where the frames are that were folded."""
    error.__traceback__ = program_frames(error.__traceback__)
    told = TracebackException.from_exception(error)
    full = "".join(told.format())
    said = next(told.format_exception_only()).splitlines()[0]
    if not _has_users_frame(told):
        return Told(full, full, said)
    _fold(told, hint)
    return Told(full, "".join(told.format()), said)


def program_frames(trace: TracebackType | None) -> TracebackType | None:
    """``trace`` without the frames on top of it that started the program."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_START):
        trace = trace.tb_next
    return trace


class _Folded(traceback.StackSummary):
    """A stack in which a frame without a file stands for several, and its name tells of them."""

    def format_frame_summary(self, frame_summary: FrameSummary, **options: bool) -> str:
        if not frame_summary.filename:
            return f"  [{frame_summary.name}]\n"
        return super().format_frame_summary(frame_summary, **options)


def _fold(told: TracebackException, hint: str) -> None:
    told.__cause__ = _next_with_users_frame(told.__cause__)
    told.__context__ = _next_with_users_frame(told.__context__)
    for other in (told.__cause__, told.__context__, *(getattr(told, "exceptions", None) or ())):
        if other is not None:
            _fold(other, hint)
    stack: list[FrameSummary] = []
    num_folded = 0
    for frame in [*told.stack, None]:
        if frame is not None and not _is_users(frame):
            num_folded += 1
            continue
        if num_folded:
            frames = "1 frame" if num_folded == 1 else f"{num_folded} frames"
            stack.append(
                FrameSummary("", None, f"{frames} of lockstep, torch and Python{hint}", line="")
            )
            num_folded = 0
        if frame is not None:
            stack.append(frame)
    told.stack = _Folded(stack)


def _next_with_users_frame(told: TracebackException | None) -> TracebackException | None:
    # One without any frame comes from another process, with that one's traceback in its text.
    while told is not None and told.stack and not _has_users_frame(told):
        told = told.__cause__ or (None if told.__suppress_context__ else told.__context__)
    return told


def _has_users_frame(told: TracebackException) -> bool:
    return any(_is_users(frame) for frame in told.stack)


def _is_users(frame: FrameSummary) -> bool:
    import torch

    name = frame.filename
    if name.startswith((_PACKAGE, os.path.dirname(torch.__file__) + os.sep, "<frozen ")):
        return False
    # Other people's packages may lie in a folder of Python's own, and are shown.
    return not name.startswith(_PYTHON) or "site-packages" in name
