"""``python -m lockstep`` is the command ``lockstep``."""

from lockstep.cli import main

main()
