"""The options of ``lockstep run``, and a quick way to read the most common of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class RunOptions:
    """What ``lockstep run`` was given, as text; None is what wasn't given.

    ``num_hosts`` and those below it are for runs on several hosts.
    """

    program: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    num_ranks: str | None = None
    num_threads: str | None = None
    log_dir: str | None = None
    num_hosts: str = "1"
    host: str | None = None
    endpoint: str | None = None
    run_id: str = "lockstep"
    timeout_seconds: str = "300"


_NAMES = {
    "-n": "num_ranks",
    "--nprocs": "num_ranks",
    "--threads": "num_threads",
    "--log-dir": "log_dir",
}


def plain_run(argv: Sequence[str]) -> RunOptions | None:
    """The options of a plain ``run``, or None for all else, which the whole parser reads.

    Plain are ``-m`` and the options of ``_NAMES``, each followed by its value. Whatever is
    understood here is understood alike there: test_plain_run_agrees_with_the_whole_parser.
    """
    if not argv or argv[0] != "run":
        return None
    options, rest = RunOptions(""), list(argv[1:])
    while rest:
        word = rest.pop(0)
        if word == "-m":
            options = replace(options, module=True)
        elif word in _NAMES and rest and not rest[0].startswith("-"):
            options = replace(options, **{_NAMES[word]: rest.pop(0)})  # type: ignore[arg-type]
        elif not word or word.startswith("-"):
            return None
        else:
            return replace(options, program=word, arguments=tuple(rest))
    return None
