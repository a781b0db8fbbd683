"""Whether those of torch's tests that fail with our code are meant to: by name and by error."""

from __future__ import annotations

import re
import traceback
import unittest
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


class Difference(NamedTuple):
    """Why a test is meant to fail, and how.

    Attributes:
        why: In words, for whoever reads the table.
        errors: How its errors begin, as ``"line 7: ValueError: No "``. A rank may raise one,
            another rank another one.
    """

    why: str
    errors: tuple[str, ...]


class Result(NamedTuple):
    """What came of a test.

    Attributes:
        outcome: ``"passed"``, ``"skipped"`` or ``"failed"``.
        errors: One of each rank that failed, as ``"line 7: ValueError: its message"``, where lines
            are counted from the start of the test.
        details: Why it was skipped, or the tracebacks.
    """

    outcome: str
    errors: Sequence[str] = ()
    details: str = ""


# Errors of a rank that failed because another one did.
_OF_ANOTHER = re.compile(
    r"[^:]+: (PeerLost: |CollectiveTimeout: |RuntimeError: (barrier timeout$|"
    r"Rank \d+ successfully reached monitoredBarrier|\[\S*gloo/transport))"
)


def result_of(end: BaseException, name: str) -> Result:
    """What came of a test, by its name, on a rank where it ended with ``end``."""
    from torch.testing._internal.common_distributed import TEST_SKIPS

    skips: dict[object, str] = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
    skips[0] = skips[None] = ""
    if isinstance(end, unittest.SkipTest):
        return Result("skipped", details=str(end))
    if isinstance(end, SystemExit) and end.code in skips:
        return Result("skipped" if end.code else "passed", details=skips[end.code])
    kind, message = type(end).__name__, " ".join(str(end).split())
    details = "".join(traceback.format_exception(end))
    return Result("failed", [f"{_place(end, name)}: {kind}: {message}"], details)


def _place(end: BaseException, name: str) -> str:
    """The line of torch's tests that raised, counted from the start of its function."""
    for frame, line in reversed([*traceback.walk_tb(end.__traceback__)]):
        code = frame.f_code
        # Comprehensions have frames of their own in Python 3.11 only.
        if code.co_filename.endswith("distributed_test.py") and code.co_name[0] != "<":
            function = "" if code.co_name == name else f" of {code.co_name}()"
            return f"line {line - code.co_firstlineno}{function}"
    return "before it"


def joined(results: Sequence[Result]) -> Result:
    """What came of a test, from what came of it on each rank."""
    for outcome in ("failed", "skipped"):
        some = [result for result in results if result.outcome == outcome]
        if some:
            errors = [error for result in some for error in result.errors]
            local = [error for error in errors if not _OF_ANOTHER.match(error)]
            details = dict.fromkeys(result.details for result in some)
            return Result(outcome, list(dict.fromkeys(local or errors)), "\n".join(details))
    return Result("passed")


class Judgement(NamedTuple):
    """What a test's result counts as, what there is to say of it, and whether it is meant."""

    kind: str
    told: str
    is_meant: bool = True


class Differences(NamedTuple):
    """The tests of torch's that are meant to fail with our code, by name.

    Attributes:
        on_purpose: Those that pass with torch's own.
        untestable: Those that fail with torch's own as well.
    """

    on_purpose: Mapping[str, Difference]
    untestable: Mapping[str, Difference]

    def judge(self, name: str, ours: Result, theirs: Result | None = None) -> Judgement:
        """Judge what came of a test with our code, and of what is said here of torch's own."""
        meant = self.on_purpose.get(name) or self.untestable.get(name)
        if wrong := _what_is_wrong(ours, meant) or self._what_is_untrue(name, ours, theirs):
            return Judgement("NOT MEANT", wrong, is_meant=False)
        if meant is None:
            return Judgement(ours.outcome, ours.details)
        kind = (
            "different on purpose" if name in self.on_purpose else "untestable: torch's own fails"
        )
        return Judgement(kind, meant.why)

    def _what_is_untrue(self, name: str, ours: Result, theirs: Result | None) -> str:
        if theirs is None:
            return ""
        if name in self.on_purpose and theirs.outcome != "passed":
            return "torch's own doesn't pass: the test is none of a difference"
        if name in self.untestable and theirs.outcome != "failed":
            return "torch's own doesn't fail: the test is no untestable one"
        if ours.outcome == "skipped" != theirs.outcome:
            return f"skipped with ours alone: {ours.details}"
        return ""

    def not_among(self, names: Collection[str]) -> list[str]:
        """Say which of the tests that are listed here torch doesn't have."""
        missing = {*self.on_purpose, *self.untestable} - {*names}
        return [f"{name}: listed, and not among torch's tests" for name in sorted(missing)]


def _what_is_wrong(result: Result, meant: Difference | None) -> str:
    if meant is None:
        return f"failed: {' | '.join(result.errors)}" if result.outcome == "failed" else ""
    if result.outcome != "failed":
        return f"{result.outcome}, and is listed as one that fails: {meant.why}"
    others = [error for error in result.errors if not error.startswith(meant.errors)]
    if others or not result.errors:
        return f"failed, but not as is listed ({meant.why}): {' | '.join(others)}"
    return ""


def conclude(wrong: Sequence[str]) -> int:
    """Print what isn't as it is meant, and return the exit code."""
    print("\n" + "\n  ".join(["not as it is meant:", *wrong] if wrong else ["all as it is meant"]))
    return int(bool(wrong))
