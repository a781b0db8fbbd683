"""What ``lockstep COMMAND --help`` begins with, for each command."""

LOCKSTEP = """\
Synchronous data parallelism for PyTorch: one model, many devices, the same
step.

  run      run a Python script on several ranks, and leave none behind
  explain  tell what of a script's models is split, copied and reduced
  report   tell where the time of a traced run went, and which rank is late
  status   tell what the ranks of a run do that looks stuck
  doctor   tell what is on this machine, and what is wrong with it
  demo     train a small network on handwritten digits, over several processes
  bench    measure, on this machine, what training in step costs
  help     tell of an error what causes it, and what to do
  show     print what is in a checkpoint of lockstep.save(), and verify it
  export   write a checkpoint's model to a file of safetensors

`lockstep run train.py` runs a script on a rank for each NVIDIA GPU, or on 2
where there is none; `lockstep run --help` tells more."""

RUN = """\
Run a Python script on several ranks, and leave none behind.

Each rank runs the script as `python SCRIPT ARGS` would. lockstep.init() gives
it its place among the others. Lines of output are labelled with the rank that
wrote them. The first rank that fails ends the run, and is reported with its
traceback. What follows SCRIPT is the script's: options of lockstep stand
before it.

Two ranks on this machine:
  lockstep run -n 2 train.py --epochs 3

A module, with four threads for each rank:
  lockstep run -n 2 --threads 4 -m my_package.train

Two machines with eight ranks each; the same on the other one, with --node-rank 1:
  lockstep run --nnodes 2 --node-rank 0 --rdzv-endpoint first:29500 -n 8 train.py"""

EXPLAIN = """\
Tell what of a script's models is split, copied and reduced.

The script runs on the ranks until it has taken two optimizer steps. Then rank
0 tells, as lockstep.explain(model) does, which parameters are kept in step and
how, in which buckets their gradients are sent, how many bytes a step sends,
what is unusual and what to change."""

REPORT = """\
Tell why a traced run isn't N times as fast on N ranks: what waits for data or
for a late rank, what sending takes, what each of these would give back, and
what to do. Two traces are compared.

  lockstep run -n 2 --trace run1 --baseline train.py
  lockstep report run1"""

DOCTOR = """\
Tell what is on this machine, what lockstep.init() makes of it, and what is
wrong and how to mend it.

Some ranks are started, meet, and time an all-reduce. The exit code is 1 if
something is wrong."""

STATUS = """\
Tell what the ranks of a run do that looks stuck: who waits, in which operation,
for whom, and at which line of the program that one is.

It finds what 'lockstep run' and launch() have started on this host, and changes
nothing about it."""

DEMO = """\
Train a small network on handwritten digits, over several processes.

Then show that nothing was lost by splitting: one more epoch, on all processes
and in one, and the largest difference between the two sets of parameters."""

HELP = """\
Tell what causes an error of lockstep, and what to do.

  lockstep help PeerLost"""

SHOW = """\
Print what is in a checkpoint, and verify every byte of it.

CHECKPOINT is the folder that was given to lockstep.save(), of which the newest
one is shown, or one of those in it, such as run/000001."""

EXPORT = """\
Write the tensors of a checkpoint's model to a file of safetensors.

  lockstep export run model.safetensors --thing model"""

BENCH = """\
Measure, on this machine, what training in step costs.

  collectives   collectives in shared memory beside Gloo's and MPI's"""

COLLECTIVES = """\
Compare collectives in shared memory with Gloo's and, if mpi4py is installed,
MPI's.

One set of processes, of one thread each, holds a Gloo and a shm group. The
contenders take turns, round after round, so that whatever else the machine
does happens to all of them. shm is measured with ordinary tensors and with
tensors from `group.empty()`, which are reduced in place. MPI has processes of
its own, and its turns after the others'.

What is timed: before each call every rank writes its whole tensor, as a
backward pass does with gradients; that isn't counted. Above 64 KiB the ranks
then meet, and a call takes from when the first rank begins until the last one
is through; up to there, calls follow each other, and what the slowest rank
spends in them counts. Shown are the median and the quartiles of the rounds.
Ratios are formed in each round by itself.

The bound, from 1 MiB on, is measured beside the all-reduces: the passes over
memory that an all-reduce in place makes, on all ranks at once but without any
meeting. What it takes longer than that, meetings and Python take.

Small calls cost what Python costs; the parts of such a call are listed below
its table.

All of it takes some minutes and, for 256 MiB on 4 ranks, 3 GiB of memory. A quick look:
  lockstep bench collectives --ranks 2 --sizes 1KiB,1MiB,16MiB --rounds 5"""
