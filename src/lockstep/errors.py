"""Every error that lockstep raises on its own account, drawn as a tree.

::

    LockstepError
    ├── InitError                  init() could not give this process its place
    │   ├── ContradictoryInit        it was asked twice, for different things
    │   ├── RendezvousFailed         the ranks did not meet in time
    │   └── BackendUnavailable       the communication library cannot be used here
    ├── ModelError                 a model cannot be trained in step
    │   ├── ModelMismatch            the ranks built different models
    │   ├── NothingToTrain           no parameter requires a gradient
    │   ├── AlreadyParallel          it, or a part of it, is parallel already
    │   ├── ParameterChanged         a parameter has another shape, dtype or device than before
    │   ├── HookError                a communication hook returned what gradients can't become
    │   └── LateGradient             a gradient came after its bucket had left
    ├── CollectiveFailed           the ranks could not finish something together
    │   ├── PeerLost                 one of them is gone
    │   ├── CollectiveTimeout        one of them didn't come in time
    │   ├── CollectiveMismatch       they called different things
    │   └── GroupClosed              the process group was destroyed, or is another process's
    ├── ReplicaLost                the process of a DataParallel's replica is gone
    ├── SharedMemoryFull           there is no room for memory that ranks share
    ├── SplitError                 data cannot be divided as asked
    ├── LaunchError                ranks could not be started
    │   ├── BadLaunch                what to run, or on how many ranks, makes no sense
    │   └── RankFailed               a rank was started and did not end well
    └── MissingExtra               an optional dependency is not installed

What the caller got wrong is a ``ValueError`` as well, what the surroundings refuse a
``RuntimeError``, so that code that knows nothing of lockstep can catch them by habit; a
``ModelError`` is a ``RuntimeError`` too, which is what torch raises of models.
"""

from __future__ import annotations

__all__ = [
    "AlreadyParallel",
    "BackendUnavailable",
    "BadLaunch",
    "CollectiveFailed",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "ContradictoryInit",
    "GroupClosed",
    "HookError",
    "InitError",
    "LateGradient",
    "LaunchError",
    "LockstepError",
    "MissingExtra",
    "ModelError",
    "ModelMismatch",
    "NothingToTrain",
    "ParameterChanged",
    "PeerLost",
    "RankFailed",
    "RendezvousFailed",
    "ReplicaLost",
    "SharedMemoryFull",
    "SplitError",
]


class LockstepError(Exception):
    """Base of every error that lockstep raises."""


class InitError(LockstepError, RuntimeError):
    """``init()`` could not find out, or take, this process's place among the ranks."""


class ContradictoryInit(InitError, ValueError):
    """``init()`` was called again and asked for something other than what is there."""


class RendezvousFailed(InitError, TimeoutError):
    """The ranks did not all meet within the timeout."""


class BackendUnavailable(InitError):
    """The communication library that was asked for cannot be used on this machine."""


class ModelError(LockstepError, RuntimeError):
    """A model, as it is, cannot be trained in step."""


class ModelMismatch(ModelError, ValueError):
    """The ranks built models whose parameters or buffers differ in name, shape or dtype."""


class NothingToTrain(ModelError, ValueError):
    """The model has no parameter that requires a gradient."""


class AlreadyParallel(ModelError, ValueError):
    """The model, or a module inside or around it, is already parallel."""


class ParameterChanged(ModelError):
    """A parameter no longer has the shape, dtype or device that it was wrapped with."""


class HookError(ModelError, TypeError, ValueError):
    """A communication hook returned something else than a future of as many numbers as it got."""


class LateGradient(ModelError):
    """A parameter got another gradient in a backward that had already sent the first one."""


class CollectiveFailed(LockstepError, RuntimeError):
    """Something that all ranks do together failed, mostly because one of them is gone."""


class PeerLost(CollectiveFailed):
    """A rank that the others need is gone: its process ended, was killed, or left the group.

    Attributes:
        ranks: The ranks that are gone, by their numbers in the whole run.
        operation: What this rank was doing, such as ``"all_reduce"``.
    """

    def __init__(
        self, message: str, ranks: list[int] | tuple[int, ...] = (), operation: str = ""
    ) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.operation = operation


class CollectiveTimeout(CollectiveFailed, TimeoutError):
    """Not all ranks came to an operation within the group's timeout.

    Attributes:
        ranks: The ranks that didn't come, by their numbers in the whole run.
        operation: What the others waited in, such as ``"all_reduce"``.
    """

    def __init__(
        self, message: str, ranks: list[int] | tuple[int, ...] = (), operation: str = ""
    ) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.operation = operation


class CollectiveMismatch(CollectiveFailed, ValueError):
    """The ranks called different operations, or the same with different shapes or dtypes.

    Attributes:
        ranks: Ranks whose calls differ from this one's, by their numbers in the whole run.
        operation: What this rank called, such as ``"all_reduce"``.
    """

    def __init__(
        self, message: str, ranks: list[int] | tuple[int, ...] = (), operation: str = ""
    ) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.operation = operation


class GroupClosed(CollectiveFailed):
    """The process group was destroyed, or belongs to the process that this one was forked from."""


class ReplicaLost(LockstepError, RuntimeError):
    """The process of a replica has ended, or was ended as it didn't answer, with all it had."""


class SharedMemoryFull(LockstepError, MemoryError):
    """There is no room for memory that the ranks of a host share."""


class SplitError(LockstepError, ValueError):
    """Data, or a batch, cannot be divided into the parts asked for."""


class LaunchError(LockstepError, RuntimeError):
    """The ranks could not be started as asked."""


class BadLaunch(LaunchError, ValueError):
    """What was to be launched, or on how many ranks, cannot be launched by anyone."""


class RankFailed(LaunchError):
    """A rank did not end well; its failure is the first one of the run.

    Attributes:
        rank: The rank that failed first.
        exit_code: Its exit code, or None if a signal ended it.
        signal: The name of the signal that ended it, such as ``"SIGKILL"``, or None.
        traceback: Its whole Python traceback, or None if it left none.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        exit_code: int | None = None,
        signal: str | None = None,
        traceback: str | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code
        self.signal = signal
        self.traceback = traceback


class MissingExtra(LockstepError, ImportError):
    """A feature needs a package that is installed with one of lockstep's extras."""
