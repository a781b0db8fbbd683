"""Exit codes of a run that tell a scheduler whether to start it again.

0 means done. All others are those of the rank that failed first, or 128 and the number of a signal.
"""

from __future__ import annotations

# Stopped and saved: the same command goes on from there. A rank that ends with it has been asked to
# stop, and has saved. It is EX_TEMPFAIL of <sysexits.h>.
START_AGAIN = 75
# The ranks were started again as often as they may, and failed alike at the same place each time,
# or the program never began.
DONT_START_AGAIN = 76
