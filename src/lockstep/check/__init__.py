"""``lockstep run --check``: whether a program trains alike on several ranks and in one process."""

from lockstep.check.command import check

__all__ = ["check"]
