import os

# Threads of OpenMP that have nothing to do sleep, also those of processes that tests start: what
# runs beside them needs the cores. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
