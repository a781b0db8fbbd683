"""A simulated accelerator for the tests: GPUs where there are none, or devices of another kind.

It makes a build of torch for the CPU believe that it has devices with truly asynchronous streams
(``device/``, in C++). They are CUDA's (``cuda.py``), or of a kind that torch doesn't know and that
registers itself, as NPUs do (``sim.py``; torch calls it PrivateUse1). Operators are enqueued and
run later by threads of their streams, on the same memory by the CPU's kernels; freed memory is used
again in its stream's order, full of NaN; a copy or a collective for which nobody waits is read
too early. So it finds missing waits and memory that is freed too early, and it counts how often the
host waits for a device.

It doesn't have a GPU's speed or kernels, sparse tensors, captured graphs, compiled code, or NCCL's
deadlocks, and doesn't take the place of a real GPU.

``make test-simulated`` (``__main__``) runs the tests of ``tests/gpu`` and those here on it. They
are skipped where there is no compiler for C++. In the environment that :func:`build.environment`
gives, every Python has the devices once it imports torch (``site/``):

- ``SIM_DISGUISE``: what they are called, "cuda" or "sim".
- ``SIM_DEVICES``: how many; 2 by default.
- ``SIM_DELAY``: how long work waits before it runs unless anybody waits for it, in milliseconds, on
  default streams and others: ``0,20``; ``lazy`` for ever. See :func:`control.delayed`.
"""
