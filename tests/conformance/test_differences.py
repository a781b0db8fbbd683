"""What ``make conformance`` takes for meant, and what makes it fail."""

from __future__ import annotations

import pytest

from tests.conformance.differences import Difference, Differences, Result, joined

DIFFERENCES = Differences(
    on_purpose={
        "test_hook": Difference(
            "it runs later", ("line 7: AssertionError: not close! 1 of 4 by 0.5",)
        ),
        "test_ranks": Difference("in other words", ("ValueError: first", "TypeError: second")),
    },
    untestable={"test_gpu": Difference("it needs a GPU", ("RuntimeError: no GPU",))},
)
PASSED, SKIPPED = Result("passed"), Result("skipped", details="no NCCL")


def failed(*errors: str) -> Result:
    return joined([*(Result("failed", [error], "a traceback") for error in errors), PASSED])


@pytest.mark.parametrize(
    ("name", "ours", "theirs", "kind"),
    [
        ("test_other", PASSED, PASSED, "passed"),
        ("test_other", SKIPPED, SKIPPED, "skipped"),
        ("test_other", PASSED, failed("KeyError: 1"), "passed"),
        (
            "test_hook",
            failed("line 7: AssertionError: not close! 1 of 4 by 0.5 at 3"),
            PASSED,
            "different on purpose",
        ),
        (
            "test_ranks",
            failed("TypeError: second", "ValueError: first"),
            PASSED,
            "different on purpose",
        ),
        (
            "test_ranks",
            failed("ValueError: first", "line 9: PeerLost: rank 0 is gone"),
            None,
            "different on purpose",
        ),
        (
            "test_gpu",
            failed("RuntimeError: no GPU here"),
            failed("OSError: 2"),
            "untestable: torch's own fails",
        ),
    ],
    ids=str,
)
def test_what_is_listed_is_meant(name: str, ours: Result, theirs: Result | None, kind: str) -> None:
    assert DIFFERENCES.judge(name, ours, theirs)[::2] == (kind, True)


@pytest.mark.parametrize(
    ("name", "ours", "theirs", "says"),
    [
        ("test_other", failed("KeyError: 1"), PASSED, "failed: KeyError: 1"),
        # Whatever torch's own does, what isn't listed must not fail.
        ("test_other", failed("KeyError: 1"), failed("KeyError: 1"), "failed: KeyError: 1"),
        (
            "test_hook",
            failed("line 7: AssertionError: not close! 4 of 4 by 9"),
            PASSED,
            "4 of 4 by 9",
        ),
        (
            "test_hook",
            failed(
                "line 7: AssertionError: not close! 1 of 4 by 0.5", "line 7: AssertionError: no"
            ),
            PASSED,
            r"as is listed \(it runs later\): line 7: AssertionError: no$",
        ),
        ("test_hook", failed("line 8: AssertionError: not close! 1 of 4 by 0.5"), PASSED, "line 8"),
        (
            "test_ranks",
            failed("line 9: PeerLost: rank 0 is gone"),
            PASSED,
            "line 9: PeerLost: rank 0 is gone",
        ),
        ("test_hook", PASSED, PASSED, "^passed, and is listed as one that fails: it runs later"),
        ("test_hook", SKIPPED, PASSED, "^skipped, and is listed"),
        ("test_other", SKIPPED, PASSED, "skipped with ours alone: no NCCL"),
        ("test_ranks", failed("ValueError: first"), failed("OSError: 2"), "own doesn't pass"),
        ("test_gpu", failed("RuntimeError: no GPU"), PASSED, "own doesn't fail"),
    ],
    ids=str,
)
def test_anything_else_is_not(name: str, ours: Result, theirs: Result, says: str) -> None:
    judgement = DIFFERENCES.judge(name, ours, theirs)
    assert not judgement.is_meant
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(judgement.told)


def test_a_listed_test_that_torch_does_not_have_is_told() -> None:
    names = ["test_hook", "test_gpu", "test_other"]
    assert DIFFERENCES.not_among(names) == ["test_ranks: listed, and not among torch's tests"]
