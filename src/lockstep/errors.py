"""Every error class of lockstep, drawn as a tree.

::

    LockstepError
    ├── InitError                  init() failed
    │   ├── ContradictoryInit        it was called twice, with other arguments
    │   ├── RendezvousFailed         the ranks did not meet in time
    │   └── BackendUnavailable       the process group's backend cannot be used here
    ├── ModelError                 a model cannot be trained in step
    │   ├── ModelMismatch            the ranks built different models
    │   ├── NothingToTrain           no parameter requires a gradient
    │   ├── AlreadyParallel          it, or a part of it, is parallel already
    │   ├── ParameterChanged         a parameter has another shape, dtype or device than before
    │   ├── HookError                a communication hook returned something unusable
    │   └── LateGradient             a gradient came after its bucket was launched
    ├── CollectiveFailed           an operation of all ranks failed
    │   ├── PeerLost                 one of them is gone
    │   ├── CollectiveTimeout        one of them didn't come in time
    │   ├── CollectiveMismatch       they called different operations
    │   └── GroupClosed              the process group was destroyed, or is another process's
    ├── StepSkipped                a guarded step was not applied
    ├── ReplicasDiffer             ranks don't have the same parameters
    ├── CheckpointError            a checkpoint was not saved, or not loaded
    │   ├── SaveFailed               it could not be written
    │   ├── CheckpointNotFound       there is none
    │   ├── CheckpointDamaged        a file of it is missing, or isn't as it was written
    │   └── CheckpointMismatch       it has other things, or the ranks' things differ
    ├── SharedMemoryFull           there is no room for memory that ranks share
    ├── SplitError                 data cannot be divided as asked
    ├── TraceError                 a trace cannot be read
    ├── LaunchError                ranks could not be started
    │   ├── BadLaunch                the program or an option makes no sense
    │   └── RankFailed               a rank was started and failed
    └── MissingExtra               an optional dependency is not installed

A mistake of the caller is a ``ValueError`` too, a refusal of the environment a ``RuntimeError``:
code that doesn't know lockstep catches them as usual. A ``ModelError`` is a ``RuntimeError`` too,
which is what torch raises for models.
"""

from __future__ import annotations


class LockstepError(Exception):
    """Base of every error that lockstep raises.

    Its last note tells of ``lockstep help``, which has the causes and what to do (``errors.md``).
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        if not isinstance(self, LaunchError):  # whose message is all that there is to say
            self.__notes__ = [self._help]

    @property
    def _help(self) -> str:
        return f"('lockstep help {type(self).__name__}' tells more.)"

    def add_note(self, note: str, /) -> None:
        """Add a note, before the one that tells of ``lockstep help``."""
        notes = [*getattr(self, "__notes__", ())]
        notes.insert(len(notes) - (notes[-1:] == [self._help]), note)
        self.__notes__ = notes


class InitError(LockstepError, RuntimeError):
    """``init()`` could not determine this process's rank, or could not take it."""


class ContradictoryInit(InitError, ValueError):
    """``init()`` was called again, with arguments that contradict the existing world."""


class RendezvousFailed(InitError, TimeoutError):
    """The ranks did not all meet within the timeout.

    Attributes:
        ranks: Those that did not come, as far as that is known.
    """

    def __init__(self, message: str = "", ranks: list[int] | tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class BackendUnavailable(InitError):
    """The backend that was asked for cannot be used on this machine."""


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
    """A communication hook returned no future, or a tensor of another size than its bucket."""


class LateGradient(ModelError):
    """A parameter got a gradient in a backward after its bucket was launched."""


class CollectiveFailed(LockstepError, RuntimeError):
    """An operation of all ranks failed, mostly because one of them is gone.

    Attributes:
        ranks: The ranks that are the cause, by their numbers in the whole run.
        operation: The operation of this rank, such as ``"all_reduce"``.
    """

    def __init__(
        self, message: str, ranks: list[int] | tuple[int, ...] = (), operation: str = ""
    ) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.operation = operation


class PeerLost(CollectiveFailed):
    """A rank that the others need is gone: its process ended, was killed, or left the group."""


class CollectiveTimeout(CollectiveFailed, TimeoutError):
    """Not all ranks came to an operation within the group's timeout; ``ranks`` are the others."""


class CollectiveMismatch(CollectiveFailed, ValueError):
    """The ranks called different operations, or the same with different shapes or dtypes."""


class GroupClosed(CollectiveFailed):
    """The process group was destroyed, or belongs to the process that this one was forked from."""


class StepSkipped(LockstepError, RuntimeError):
    """A guarded step is not applied on any rank, as it has failed on one.

    ``guard()`` raises it where the body of a step is to end, and catches it; and to the program
    when too many steps in a row were skipped.

    Attributes:
        blame: The :class:`lockstep.Blame` of the last one, once it is known.
    """

    blame: object = None


class ReplicasDiffer(LockstepError, RuntimeError):
    """Ranks don't have the same parameters, buffers, optimizer's options or state.

    Attributes:
        differences: What differs, and on which ranks, as :func:`lockstep.check_replicas` tells it.
    """

    def __init__(self, message: str, differences: list[object] | tuple[object, ...] = ()) -> None:
        super().__init__(message)
        self.differences = [*differences]


class CheckpointError(LockstepError, RuntimeError):
    """A checkpoint was not saved or not loaded.

    Attributes:
        rank: The rank whose error this is, by its number in the whole run, if it is another one's.
    """

    rank: int | None = None


class SaveFailed(CheckpointError):
    """A checkpoint could not be written; those saved before are as they were."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """There is no checkpoint where one was to be loaded."""


class CheckpointDamaged(CheckpointError, ValueError):
    """A file of a checkpoint is missing, of a newer format, or isn't as it was written."""


class CheckpointMismatch(CheckpointError, ValueError):
    """A checkpoint has other things than are to be loaded, or the ranks' things differ."""


class SharedMemoryFull(LockstepError, MemoryError):
    """There is no room for memory that the ranks of a host share."""


class SplitError(LockstepError, ValueError):
    """Data, or a batch, cannot be divided into the parts asked for."""


class TraceError(LockstepError, ValueError):
    """There is no trace, or a file isn't of one."""


class LaunchError(LockstepError, RuntimeError):
    """The ranks could not be started as asked."""


class BadLaunch(LaunchError, ValueError):
    """The program, the number of ranks, or another option of a launch makes no sense."""


class RankFailed(LaunchError):
    """A rank failed; its failure is the first one of the run.

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


__all__ = [name for name, each in list(globals().items()) if isinstance(each, type)]
