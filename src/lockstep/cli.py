"""The command ``lockstep``: its options and their help.

Help is shown at once: nothing that is imported here imports torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from lockstep import launcher
from lockstep.errors import BadLaunch, LockstepError

__all__ = ["main"]

_LOCKSTEP = """\
Synchronous data parallelism for PyTorch: one model, many devices, the same step.

  run     run a Python script on several ranks, and leave none behind
  demo    train a small network on handwritten digits, over several processes
  bench   measure, on this machine, what training in step costs

`lockstep run train.py` runs a script on all devices; `lockstep run --help` tells more."""

_RUN = """\
Run a Python script on several ranks, and leave none behind.

Each rank runs the script as `python SCRIPT ARGS` would. lockstep.init() gives it its place
among the others. Lines of output are labelled with the rank that wrote them. The first rank
that fails ends the run, and is reported with its traceback. What follows SCRIPT is the
script's: options of lockstep stand before it.

Two ranks on this machine:
  lockstep run -n 2 train.py --epochs 3

A module, with four threads for each rank:
  lockstep run -n 2 --threads 4 -m my_package.train

Two machines with eight ranks each; the same on the other one, with --node-rank 1:
  lockstep run --nnodes 2 --node-rank 0 --rdzv-endpoint first:29500 -n 8 train.py"""

_DEMO = """\
Train a small network on handwritten digits, over several processes.

Then show that nothing was lost by splitting: one more epoch, on all processes and in one,
and the largest difference between the two sets of parameters."""

_BENCH = """\
Measure, on this machine, what training in step costs.

  collectives   collectives in shared memory beside Gloo's and MPI's"""

_COLLECTIVES = """\
Compare collectives in shared memory with Gloo's and, if mpi4py is installed, MPI's.

One set of processes, of one thread each, holds a Gloo and a shm group. The contenders take
turns, round after round, so that whatever else the machine does happens to all of them.
shm is measured with ordinary tensors and with tensors from `group.empty()`, which are
reduced in place. MPI has processes of its own, and its turns after the others'.

What is timed: before each call every rank writes its whole tensor, as a backward pass does
with gradients; that isn't counted. Above 64 KiB the ranks then meet, and a call takes from
when the first rank begins until the last one is through; up to there, calls follow each
other, and what the slowest rank spends in them counts. Shown are the median and the
quartiles of the rounds. Ratios are formed in each round by itself.

The bound, from 1 MiB on, is measured beside the all-reduces: the passes over memory that an
all-reduce in place makes, on all ranks at once but without any meeting. What it takes longer
than that, meetings and Python take.

Small calls cost what Python costs; the parts of such a call are listed below its table.

All of it, which takes some minutes and, for 256 MiB on 4 ranks, 3 GiB of memory:
  lockstep bench collectives

A quick look:
  lockstep bench collectives --ranks 2 --sizes 1KiB,1MiB,16MiB --rounds 5"""


def main() -> None:
    """Run the command; an error of lockstep's own is shown as its message, without a traceback."""
    try:
        options = _parser().parse_args()
        options.act(options)
    except LockstepError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        sys.exit(2)


class _Parser(argparse.ArgumentParser):
    """A parser whose help is laid out as written here, and whose errors are BadLaunch."""

    def __init__(self, **options: object) -> None:
        defaults = {
            "allow_abbrev": False,
            "formatter_class": argparse.RawDescriptionHelpFormatter,
            "add_help": False,
        }
        super().__init__(**{**defaults, **options})  # type: ignore[arg-type]
        self.add_argument("-h", "--help", action="help", help="Show this and end.")
        self.set_defaults(act=self._tell)

    def error(self, message: str) -> NoReturn:
        raise BadLaunch(f"{message}. '{self.prog} --help' shows what can be given.")

    def _tell(self, _: argparse.Namespace) -> NoReturn:
        """The action of a command that has only subcommands."""
        self.print_help()
        sys.exit(2)


class _Version(argparse.Action):
    def __call__(self, *_: object) -> NoReturn:
        from importlib import metadata

        print(f"lockstep {metadata.version('torch-lockstep')}")
        sys.exit(0)


def _parser() -> argparse.ArgumentParser:
    usage = "lockstep [-h] [--version] COMMAND ..."
    parser = _Parser(prog="lockstep", usage=usage, description=_LOCKSTEP)
    parser.add_argument("--version", action=_Version, nargs=0, help="Print it.")
    commands = parser.add_subparsers(prog="lockstep", metavar="COMMAND", help=argparse.SUPPRESS)
    usage = "lockstep run [OPTIONS] SCRIPT [ARGS ...]"
    _add_run_options(commands.add_parser("run", usage=usage, description=_RUN))
    _add_demo_options(commands.add_parser("demo", description=_DEMO))
    bench = commands.add_parser("bench", description=_BENCH)
    benches = bench.add_subparsers(metavar="COMMAND", help=argparse.SUPPRESS)
    _add_collectives_options(benches.add_parser("collectives", description=_COLLECTIVES))
    return parser


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(act=_run)
    add = parser.add_argument
    # All from the script on, even if it looks like an option of ours.
    add(
        "program",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT [ARGS ...]",
        help="The script or, with -m, the module to run, and what to pass on to it.",
    )
    add(
        "-m",
        dest="module",
        action="store_true",
        help="SCRIPT is the name of a module, as in `python -m`.",
    )
    add(
        *("-n", "--nprocs"),
        metavar="N",
        help="How many ranks to start on this host; by default one for each GPU, or 2 where "
        "there is none.",
    )
    add("--nproc-per-node", dest="nprocs", metavar="N", help="The same, as torchrun calls it.")
    add("--nproc_per_node", dest="nprocs", help=argparse.SUPPRESS)
    add(
        "--threads",
        metavar="T",
        help="How many threads each rank computes with; by default the cores, divided by the "
        "ranks.",
    )
    add("--log-dir", metavar="DIR", help="Keep each rank's output in DIR/rank-R.log as well.")
    add(
        "--stdin",
        metavar="RANK|none",
        help="Which rank reads the standard input of this command, for input() and breakpoint(); "
        "by default rank 0 if that is a terminal, and none if not.",
    )
    add(
        "--full-traceback",
        action="store_true",
        help="Show the frames of lockstep, torch and Python too when a rank fails.",
    )
    add(
        "--nnodes",
        default="1",
        metavar="N",
        help="On how many hosts this command is given; by default 1.",
    )
    add(
        "--node-rank",
        metavar="R",
        help="Which of them this is, from 0. Left out, the hosts settle it among themselves.",
    )
    add(
        "--rdzv-endpoint",
        metavar="HOST:PORT",
        help="Where the hosts meet: a free port of the first of them.",
    )
    add(
        "--rdzv-id",
        default="lockstep",
        metavar="ID",
        help="Tells jobs that meet there apart; by default %(default)s.",
    )
    add(
        "--rdzv-timeout",
        default="300",
        metavar="SECONDS",
        help="How long hosts wait to meet; by default %(default)s.",
    )


def _run(options: argparse.Namespace) -> NoReturn:
    """Check the options of ``run`` and start the ranks; this process becomes their launcher."""
    words = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not words:
        raise BadLaunch("SCRIPT is missing: say what to run, as in 'lockstep run -n 2 train.py'.")
    name, *argv = words
    num_ranks = launcher.default_num_ranks()
    if options.nprocs is None:
        _warn_of_late_options(argv, num_ranks)
    else:
        num_ranks = launcher.check_num_ranks(options.nprocs)
    num_threads = launcher.default_num_threads(num_ranks)
    if options.threads is not None:
        num_threads = launcher.check_num_threads(options.threads)
    num_hosts = launcher.whole_number(
        options.nnodes, "The number of hosts", "Leave --nnodes out to run on one."
    )
    program: launcher.Module | launcher.Script
    if options.module:
        program = launcher.check_module(launcher.Module(name, tuple(argv)))
    else:
        program = launcher.check_script(launcher.Script(name, tuple(argv)))
    stdin_rank = launcher.check_stdin(options.stdin, num_ranks, num_hosts)
    hosts = (options.node_rank, options.rdzv_endpoint, options.rdzv_id, options.rdzv_timeout)
    job = launcher.Job(
        program,
        num_ranks,
        num_threads,
        log_dir=None if options.log_dir is None else os.path.abspath(options.log_dir),
        meeting=launcher.check_meeting(num_hosts, *hosts),
        stdin_rank=stdin_rank,
        full_traceback=options.full_traceback,
    )
    launcher.run_job(job)


def _warn_of_late_options(argv: Sequence[str], num_ranks: int) -> None:
    names = {word.partition("=")[0] for word in argv}
    for name in sorted(names & {"-n", "--nprocs", "--nproc-per-node", "--nproc_per_node"}):
        print(
            f"lockstep: running {num_ranks} ranks. '{name}' stands after the script, so the "
            "script gets it; give it before the script to say how many ranks to run.",
            file=sys.stderr,
        )


def _add_demo_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(act=_demo)
    add = parser.add_argument
    add(
        *("-n", "--nprocs"),
        default="2",
        metavar="N",
        help="How many processes train; by default %(default)s.",
    )
    add(
        "--epochs",
        default="15",
        metavar="E",
        help="How often to go through the training images; by default %(default)s.",
    )
    add(
        "--seed",
        type=int,
        default=1234,
        help="What all that is random is drawn from; by default %(default)s.",
    )
    add(
        "--data",
        default="digits",
        metavar="digits|mnist|FOLDER",
        help="scikit-learn's 1,797 digits, which is the default; MNIST, downloaded by torchvision; "
        "or a folder with a sub-folder of PNG or JPEG images for each class.",
    )


def _demo(options: argparse.Namespace) -> NoReturn:
    from lockstep.demo import demo

    sys.exit(0 if demo(options.nprocs, options.epochs, options.seed, options.data) else 1)


def _add_collectives_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(act=_collectives)
    add = parser.add_argument
    add(
        "--ranks",
        action="append",
        metavar="N",
        help="How many processes take part; may be given several times. By default 2, then 4.",
    )
    add(
        "--sizes",
        metavar="SIZES",
        help="Sizes of the tensor, as in 1KiB,16MiB; by default from 1KiB to 256MiB.",
    )
    add(
        "--rounds",
        default="15",
        metavar="R",
        help="How many turns each one has; by default %(default)s.",
    )
    add(
        "--operation",
        action="append",
        metavar="OP",
        help="all_reduce, which is the default, broadcast, all_gather or reduce_scatter; may be "
        "given several times. For the last two, sizes are those of all ranks' parts together.",
    )
    add(
        "--mpiexec",
        default="mpiexec",
        metavar="COMMAND",
        help="What starts the ranks of MPI; by default %(default)s.",
    )
    add(
        "--json",
        metavar="FILE",
        help="Write every round's figures to FILE as well; - prints them, and no tables.",
    )


def _collectives(options: argparse.Namespace) -> None:
    from lockstep.bench import DEFAULT_SIZES, collectives

    collectives(
        options.ranks or ["2", "4"],
        DEFAULT_SIZES if options.sizes is None else options.sizes,
        options.rounds,
        options.operation or ["all_reduce"],
        options.mpiexec,
        options.json,
    )
