"""What ``lockstep status`` makes of the stacks and pages of ranks."""

from __future__ import annotations

from pathlib import Path

import torch

from lockstep.launcher import Frame, main_stack
from lockstep.observe.attach import Observed, verdict
from lockstep.run_status import RankState

SECOND = 1_000_000_000
TORCHS = Path(torch.__file__).parent / "nn.py"
DUMP = f"""\
Thread 0x00007f01 (most recent call first):
  File "/x/threading.py", line 1 in wait

Current thread 0x00007f02 (most recent call first):
  File "{TORCHS}", line 7 in forward
  File "/home/me/lockstep/train.py", line 5 in step
  File "/home/me/lockstep/train.py", line 9 in <module>
  File "/y/rank.py", line 3 in _run_script
  File "/y/supervisor.py", line 3 in main
"""


def test_the_main_threads_frames_up_to_the_launchers_are_read() -> None:
    frames = main_stack(DUMP)
    assert [frame.line for frame in frames] == [7, 5, 9]
    assert str(Observed(STATE, 0, "running", frames).place).endswith("train.py:5, in step")
    assert main_stack("") == []


STATE = RankState(9, 0, "program", "", 0, 0, 0, 0, 0, 0, 0, 0, 0, {}, 0, 0)


def observed(rank: int, state: str, since: float, steps: int = 0, detail: str = "x") -> Observed:
    now = STATE._replace(rank=rank, state=state, since=int(since * SECOND), detail=detail)
    return Observed(now, steps, "running", [Frame("/a/train.py", 3, "f")])


def test_verdicts() -> None:
    def told(*ranks: Observed) -> str:
        return verdict(ranks, 100 * SECOND)

    late, early = (
        observed(2, "program", 0),
        [observed(r, "wait", 58, detail="send") for r in (0, 1)],
    )
    assert told(*early, late) == (
        "Ranks 0 and 1 have waited in send for 0:42, for rank 2. Rank 2 is at /a/train.py:3, in f."
    )
    assert told(*early).startswith("All ranks of this host have waited in send for 0:42")
    assert "in different operations: recv, send" in told(
        early[0], observed(1, "wait", 1, detail="recv")
    )
    assert told(observed(0, "wait", 98), late) == "No rank has waited for others for more than 5 s."
    assert told(observed(0, "wait", 1, steps=3), late) == "It goes on: 3 steps in 0.5 s."
    assert told(late, observed(1, "wait", 1)._replace(process="gone")) == "Rank 1 is gone."
    over = [observed(r, "end", 99, steps=3)._replace(process="gone") for r in (0, 1)]
    assert told(*over) == "The run is over: the program has ended on all ranks of this host."
    exiting = observed(1, "end", 99)
    assert told(over[0], exiting).endswith("The process of rank 1 has yet to end.")
    assert told(over[0], observed(1, "program", 0, steps=2)) == (
        "Rank 0 has ended. It goes on: 2 steps in 0.5 s."
    )
    assert told(over[0], early[1]) == (
        "Rank 0 has ended. Rank 1 has waited in send for 0:42, to which rank 0 will not come."
    )
    unread = late._replace(stack=[])
    assert told(*early, unread).endswith("for rank 2. Their stacks couldn't be read.")
    hasnt = observed(1, "program", 0)
    hasnt = hasnt._replace(state=hasnt.state._replace(pid=0))
    assert told(late, hasnt) == "1 of 2 ranks haven't begun."
