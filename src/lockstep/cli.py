"""The command ``lockstep``: its options and their help, for which nothing here imports torch."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import importlib
import inspect
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterable
from functools import partial
from importlib import resources
from typing import Any, NoReturn

from lockstep import cli_help, errors, launcher
from lockstep.errors import BadLaunch, LockstepError
from lockstep.folders import FULL_DISK
from lockstep.printable import printable_lines

__all__ = ["main"]


def main() -> None:
    """Run the command; an error of lockstep's own is shown as its message, without a traceback."""
    try:
        try:
            options = vars(_parser().parse_args())
        finally:  # it has shown the help, say, and exits
            _flush()
        act = options.pop("act")
        if isinstance(act, str):
            module, _, name = act.rpartition(".")
            act = getattr(importlib.import_module(f"lockstep.{module}"), name)
        is_well = act(**options)
        _flush()
    except BrokenPipeError:
        # The reader, such as `head`, has read enough.
        _drop_output()
        sys.exit(128 + signal.SIGPIPE)
    except LockstepError as error:
        _say("\n".join([str(error), *getattr(error, "__notes__", ())]))
        sys.exit(2)
    except OSError as error:
        if error.filename is not None or error.errno not in (*FULL_DISK, errno.EFBIG, errno.EIO):
            raise
        _drop_output()
        _say(f"stdout can't be written: {error.strerror}.")
        sys.exit(1)
    if is_well is not None:
        sys.exit(0 if is_well else 1)


def _flush() -> None:
    if sys.stdout is not None:  # else it is closed
        sys.stdout.flush()


def _drop_output() -> None:
    """Drop what stdout hasn't taken: Python's own flush at exit would fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _say(words: str) -> None:
    with contextlib.suppress(OSError):
        # Names of files or hosts, which others may have given, are in it.
        print(printable_lines(f"lockstep: {words}"), file=sys.stderr, flush=True)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Breaks no word at a hyphen: an option's value would be two words."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are BadLaunch.

    ``act`` is called with the options that were given, and has the defaults of the others; a bool
    that it returns makes the exit code. It may be named, as in ``"observe.report"``: the module is
    imported for the call. By default it shows the help, for a command that only has subcommands.
    """

    def __init__(self, act: Callable[..., object] | str | None = None, **options: Any) -> None:
        super().__init__(
            **options,
            allow_abbrev=False,
            add_help=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=partial(_Formatter, width=78),
        )
        self._options: list[str] = []
        self.option("-h --help", "Show this and end.", action="help")
        self.set_defaults(act=act or self._show_help)

    def option(self, words: str, help_text: str, **how: Any) -> None:
        """Add an option; ``words`` are its names and, if it takes a value, a name of that."""
        names = [word for word in words.split() if word.startswith("-")]
        for metavar in words.split()[len(names) :]:
            how["metavar"] = metavar
        self._options += names
        self.add_argument(*names, help=help_text, **how)

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith("?") else "."
        raise BadLaunch(f"{message}{end} '{self.prog} --help' shows what can be given.")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse what isn't known here, where its name can be compared with this command's."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            word = unknown[0].partition("=")[0]
            what = "an option" if word.startswith("-") else "an argument"
            hint = _did_you_mean(word, self._options)
            self.error(f"{word!r} isn't {what} of '{self.prog}'{hint}")
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            hint = _did_you_mean(value, action.choices)
            if value.endswith(".py"):
                hint = f". Did you mean '{self.prog} run {value}'?"
            names = ", ".join(action.choices)
            self.error(f"{value!r} isn't a command of '{self.prog}'{hint or '.'} It has {names}")

    def _show_help(self) -> NoReturn:
        self.print_help()
        sys.exit(2)


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint at what ``word`` may have been meant for, or "" if nothing is like it."""
    by_folded = {_folded(name): name for name in reversed([*known])}
    wanted = _folded(word)
    near = sorted((name for name in by_folded if name.startswith(wanted)), key=len)
    near = near or difflib.get_close_matches(wanted, by_folded, n=1)
    return f". Did you mean {by_folded[near[0]]}?" if near else ""


def _folded(word: str) -> str:
    """``word`` without what is easily mistaken: case, hyphens and underscores."""
    return word.casefold().replace("_", "").replace("-", "")


class _Version(argparse.Action):
    def __call__(self, *_: object) -> NoReturn:
        from importlib import metadata

        print(f"lockstep {metadata.version('torch-lockstep')}")
        sys.exit(0)


def _add_program(parser: _Parser, number: str = "N", more: str = "") -> None:
    """Add what says which program runs, and on how many ranks."""
    # All from the script on, even if it looks like an option of ours.
    program = "The script or, with -m, the module to run, and what to pass on to it."
    remainder = argparse.REMAINDER
    parser.add_argument("program", nargs=remainder, metavar="SCRIPT [ARGS ...]", help=program)
    is_module = "SCRIPT is the name of a module, as in `python -m`."
    parser.option("-m", is_module, dest="module", action="store_true")
    parser.option(
        f"-n --nprocs {number}",
        "How many ranks to start on this host; by default one for each NVIDIA GPU, or 2 where "
        f"there is none.{more}",
    )
    parser.option(
        "--threads T",
        "How many threads each rank computes with; by default the cores, divided by the ranks.",
    )


def _parser() -> argparse.ArgumentParser:
    usage = "lockstep [-h] [--version] COMMAND ..."
    parser = _Parser(prog="lockstep", usage=usage, description=cli_help.LOCKSTEP)
    parser.option("--version", "Print it.", action=_Version, nargs=0)
    hidden = argparse.SUPPRESS
    commands = parser.add_subparsers(prog="lockstep", metavar="COMMAND", help=hidden)
    usage = "lockstep run [OPTIONS] SCRIPT [ARGS ...]"
    run = commands.add_parser("run", usage=usage, description=cli_help.RUN, act=_run)
    more = " MIN:MAX, with --restarts: MAX, or one for each GPU; where so many fail as often as "
    more += "they may, one fewer goes on, down to MIN."
    _add_program(run, "N|MIN:MAX", more)
    run.option("--nproc-per-node N", "The same, as torchrun calls it.", dest="nprocs")
    run.option("--nproc_per_node", hidden, dest="nprocs")
    run.option(
        "--ranks threads",
        "Run the ranks as threads of this process, one at a time, with the numbers that processes "
        "have: for breakpoint(), a debugger or an IDE. Modules that SCRIPT imports are shared.",
    )
    run.option("--log-dir DIR", "Keep each rank's output in DIR/rank-R.log as well.")
    run.option(
        "--stdin RANK|none",
        "Which rank reads the standard input of this command, for input() and breakpoint(); by "
        "default rank 0 if that is a terminal, and none if not.",
    )
    folded = "Show the frames of lockstep, torch and Python too when a rank fails."
    run.option("--full-traceback", folded, action="store_true")
    not_live = "Don't show below the ranks' output what they do; only terminals show it."
    run.option("--no-live", not_live, dest="live", action="store_false")
    run.option(
        "--check STEPS",
        "Take so many optimizer steps on the ranks, then the same ones in one process on the same "
        "global batches, and tell where they part and why. Dropout is off. The script runs three "
        "times, and so writes its files three times; lockstep.save() writes nothing.",
    )
    run.option("--float64", "With --check: compute in float64.", action="store_true")
    run.option(
        "--trace DIR",
        "Record what every rank does and when, in files in DIR: trace.json is for "
        "https://ui.perfetto.dev.",
    )
    steps = "Record these steps alone, from 0; the last one is STOP - 1."
    run.option("--trace-steps FIRST:STOP", steps)
    alone = "With --trace: first take 30 steps on one rank, to compare. The script begins twice."
    run.option("--baseline", alone, action="store_true")
    profiled = "With --trace: record three steps' operators, too, by torch.profiler."
    run.option("--trace-operators", profiled, action="store_true")
    run.option(
        "--grace SECONDS",
        "How long ranks have to end by themselves, with a checkpoint say, once SIGTERM, SIGHUP or "
        "Ctrl-C has asked them to; by default 30. Then, or at a second Ctrl-C, they are killed. "
        "After a rank has failed, the others have 3 at most.",
    )
    run.option(
        "--stop-signal SIGNAL",
        "SIGUSR1 or SIGUSR2 asks ranks to stop as SIGTERM does, wherever they are; may be given "
        "twice. By default these go to ranks that have a handler, as lockstep.steps() has.",
        action="append",
    )
    run.option(
        "--restarts N",
        "When a rank fails, start all ranks again, at once, from a process that has imported torch "
        "already; up to N times in a row without progress. Exit codes: 0 done, 75 stopped and "
        "saved, start it again; 76 don't: it failed alike N times, or never began.",
    )
    run.option("--max-restarts N", "The same, as torchrun calls it.", dest="restarts")
    run.option("--max_restarts", hidden, dest="restarts")
    hosts = "On how many hosts this command is given; by default 1. MIN:MAX, with --restarts: as "
    hosts += "many as come; the others go on when one is lost, and later ones join at a step's end."
    run.option("--nnodes N|MIN:MAX", hosts)
    node_rank = "Which of them this is, from 0. Left out, the hosts settle it among themselves."
    run.option("--node-rank R", node_rank)
    run.option(
        "--rdzv-endpoint HOST:PORT", "Where the hosts meet: a free port of the first of them."
    )
    run.option("--rdzv-id ID", "Tells jobs that meet there apart; by default lockstep.")
    run.option(
        "--rdzv-timeout SECONDS",
        "How long hosts wait to meet; by default 300. With --restarts also how long they wait for "
        "a host that is gone, until 'lockstep run' is given there again.",
    )
    last_call = "With --nnodes MIN:MAX, for how long a run that begins waits for more than MIN."
    run.option("--last-call SECONDS", last_call)
    run.option(
        "--host-timeout SECONDS",
        "For how long nothing is heard of a host before it counts as lost, and all ranks are "
        "ended; by default 60.",
    )
    usage = "lockstep explain [OPTIONS] SCRIPT [ARGS ...]"
    explain = commands.add_parser(
        "explain", usage=usage, description=cli_help.EXPLAIN, act=_explain
    )
    _add_program(explain)
    report = commands.add_parser("report", description=cli_help.REPORT, act="observe.report")
    report.add_argument("folder", metavar="DIR", help="The folder that --trace was given.")
    both = "That of another run: then the report is of this one, and compares both."
    report.add_argument("other", metavar="DIR2", nargs="?", help=both)
    report.option("--text", "Print it, and write no page.", action="store_true")
    report.option(
        "--network NETWORK",
        "Predict more ranks for this network: the latency of a message in microseconds and Gbit/s, "
        "as in 20,25, or 1gbe, 10gbe, 25gbe, 100gbe, 200gb-ib, 400gb-ib; else what fits the trace.",
    )
    status = commands.add_parser("status", description=cli_help.STATUS, act="observe.status")
    status.add_argument(
        "pid", nargs="?", metavar="PID", help="The process id of one lockstep run; by default all."
    )
    status.option("--stacks", "Print each rank's whole stack as well.", action="store_true")
    doctor = commands.add_parser("doctor", description=cli_help.DOCTOR, act="observe.doctor")
    doctor.option("-n --nprocs N", "How many ranks to start; by default one for each GPU, or 2.")
    doctor.option("--json", "Print it all as JSON.", dest="as_json", action="store_true")
    demo = commands.add_parser("demo", description=cli_help.DEMO, act="demo.demo")
    demo.option("-n --nprocs N", "How many processes train; by default 2.")
    demo.option("--epochs E", "How often to go through the training images; by default 15.")
    demo.option("--seed SEED", "What all that is random is drawn from; by default 1234.", type=int)
    demo.option(
        "--data digits|mnist|FOLDER",
        "scikit-learn's 1,797 digits, which is the default; MNIST, downloaded by torchvision; or a "
        "folder with a sub-folder of PNG or JPEG images for each class.",
    )
    help_command = commands.add_parser("help", description=cli_help.HELP, act=_help)
    help_command.add_argument(
        "error",
        nargs="?",
        metavar="ERROR",
        help="The name of its class; without one, all are listed.",
    )
    commands.add_parser("show", description=cli_help.SHOW, act="checkpoint.show").add_argument(
        "checkpoint", metavar="CHECKPOINT", help="Its folder."
    )
    export = commands.add_parser("export", description=cli_help.EXPORT, act="checkpoint.export")
    export.add_argument("checkpoint", metavar="CHECKPOINT", help="Its folder.")
    export.add_argument("to", metavar="FILE", help="The file to write.")
    export.option("--thing NAME", "What of it, as it was named in save(); by default model.")
    bench = commands.add_parser("bench", usage="lockstep bench [-h]", description=cli_help.BENCH)
    benchmarks = bench.add_subparsers(prog="lockstep bench", metavar="COMMAND", help=hidden)
    collectives = benchmarks.add_parser(
        "collectives", description=cli_help.COLLECTIVES, act="bench.collectives"
    )
    collectives.option(
        "--ranks N",
        "How many processes take part; may be given several times. By default 2, then 4.",
        action="append",
    )
    collectives.option(
        "--sizes SIZES", "Sizes of the tensor, as in 1KiB,16MiB; by default from 1KiB to 256MiB."
    )
    collectives.option("--rounds R", "How many turns each one has; by default 15.")
    collectives.option(
        "--operation OP",
        "all_reduce, which is the default, broadcast, all_gather or reduce_scatter; may be given "
        "several times. For the last two, sizes are those of all ranks' parts together.",
        action="append",
        dest="operations",
    )
    collectives.option("--mpiexec COMMAND", "What starts the ranks of MPI; by default mpiexec.")
    collectives.option(
        "--json FILE",
        "Write every round's figures to FILE as well; - prints them, and no tables.",
        dest="json_to",
    )
    return parser


def _run(
    ranks: str = "processes",
    check: str | None = None,
    float64: bool = False,
    trace: str | None = None,
    trace_steps: str | None = None,
    baseline: bool = False,
    trace_operators: bool = False,
    **options: Any,
) -> None:
    if ranks != "processes":
        given = {"check": check, "trace": trace, "trace_steps": trace_steps, **options}
        given |= {"float64": float64, "baseline": baseline, "trace_operators": trace_operators}
        _run_threads(ranks, {name: value for name, value in given.items() if value})
    if check is not None:
        if "restarts" in options:
            raise BadLaunch(
                "--check compares steps, and starts nothing again. Leave --restarts out."
            )
        from lockstep.check import check as check_program

        sys.exit(check_program(check, float64=float64, **options))
    if float64:
        raise BadLaunch("--float64 is for --check STEPS. Leave it out.")
    job = launcher.job_of(**options)
    if trace is not None or trace_steps is not None or baseline or trace_operators:
        from lockstep.observe import traced

        job = traced(job, trace, trace_steps, baseline, trace_operators)
    launcher.run_job(job)


def _run_threads(ranks: str, options: dict[str, Any]) -> NoReturn:
    known = {"program", "module", "nprocs", "threads", "full_traceback", "live"}
    if ranks != "threads":
        raise BadLaunch(f"--ranks is {ranks!r}, but only 'threads' and 'processes' are known.")
    for name in sorted(options.keys() - known):
        raise BadLaunch(
            f"--{name.replace('_', '-')} is for ranks that are processes. Leave it or --ranks out."
        )
    launcher.run_threads_job(launcher.job_of(**options))


def _explain(**options: Any) -> None:
    from lockstep.observe import explained

    launcher.run_job(explained(launcher.job_of(**options)))


def _help(error: str | None = None) -> None:
    from rich.console import Console
    from rich.markdown import Markdown

    text = resources.files("lockstep").joinpath("errors.md").read_text()
    sections = {part.partition("\n")[0]: part for part in text.split("## ")[1:]}
    if error is None:
        print("'lockstep help' and a name tells of one of these:")
        _print_tree(LockstepError)
        return
    # As a traceback has it: lockstep.errors.PeerLost: ...
    word = error.rstrip(":").rpartition(".")[2]
    by_folded = {_folded(name): name for name in errors.__all__}
    name = by_folded.get(_folded(word))
    if name is None:
        hint = _did_you_mean(word, errors.__all__) or ". 'lockstep help' lists them."
        raise BadLaunch(f"lockstep has no error {error!r}{hint}")
    if name in sections:
        Console().print(Markdown(f"## {sections[name]}"))
        return
    found = getattr(errors, name)
    told = (inspect.getdoc(found) or "").partition("\n\n")[0]
    Console().print(Markdown(f"## {name}\n\n{told}"))
    print("\nAll of these are one; 'lockstep help' and a name tells what to do about it:")
    _print_tree(found)


def _print_tree(error: type[LockstepError], depth: int = 0) -> None:
    """Print a line for an error and for each that is one, with what its docstring begins with."""
    told = (error.__doc__ or "").partition("\n")[0]
    line = f"{error.__name__}{':' * bool(told)} {told}".rstrip()
    width = max(40, shutil.get_terminal_size().columns)
    indent = "  " * depth
    print(textwrap.fill(line, width, initial_indent=indent, subsequent_indent=indent + "    "))
    for each in error.__subclasses__():
        if each.__bases__[0] is error and each.__name__ in errors.__all__:
            _print_tree(each, depth + 1)
