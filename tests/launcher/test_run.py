"""``lockstep run``: a script on several ranks is what it is on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from lockstep.launcher import check_num_threads
from tests.launcher.bench import Bench, lines_of

pytestmark = pytest.mark.forks

WHO_AM_I = """
    import json, multiprocessing, os, sys
    import beside
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
             "OMP_NUM_THREADS", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_",
             "GLIBC_TUNABLES"]
    import torch
    print(json.dumps({
        "environ": {name: os.environ[name] for name in names},
        "threads": torch.get_num_threads(),
        "argv": sys.argv,
        "path0": sys.path[0],
        "name": __name__,
        "file": __file__,
        "spec": None if __spec__ is None else __spec__.name,
        "package": __package__,
        "main": sys.modules["__main__"].__dict__ is globals(),
        "child": multiprocessing.parent_process() is not None,
        "stdin": sys.stdin.read(),
        "group": os.getpgid(0) == os.getpid(),
    }))
"""


@pytest.mark.true_start
def test_run_gives_each_rank_its_place_and_the_script_its_own_sys(bench: Bench) -> None:
    script = bench.script(WHO_AM_I, "folder/who.py")
    bench.script("", "folder/beside.py")
    run = ("run", "-n", 2, "--threads", 3, "folder/who.py", "--help", "-n", "x")
    done = bench.run(*run, env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "7654321"})
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        (line,) = lines_of(done.stdout, rank)
        seen = json.loads(line)
        assert seen.pop("environ") == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "3",
            "MALLOC_TRIM_THRESHOLD_": str(2**30),
            "MALLOC_MMAP_THRESHOLD_": "7654321",
            "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        }
        assert seen == {
            "threads": 3,
            "argv": ["folder/who.py", "--help", "-n", "x"],
            "path0": str(script.parent),
            "name": "__main__",
            "file": str(script),
            "spec": None,
            "package": None,
            "main": True,
            "child": False,
            "stdin": "",
            "group": True,
        }


def test_run_module_is_python_m(bench: Bench) -> None:
    bench.script("", "package/__init__.py")
    module = bench.script(WHO_AM_I, "package/train.py")
    bench.script("", "beside.py")
    done = bench.run("run", "-n", "1", "-m", "package.train", "-m")
    assert done.returncode == 0, done.stderr
    seen = json.loads(lines_of(done.stdout, 0)[0])
    expected = {
        "argv": [str(module), "-m"],
        "path0": str(bench.directory),
        "name": "__main__",
        "file": str(module),
        "spec": "package.train",
        "package": "package",
    }
    assert {name: seen[name] for name in expected} == expected


def test_run_module_runs_the_main_of_a_package(bench: Bench) -> None:
    bench.script("", "package/__init__.py")
    bench.script("print(__name__, __spec__.name)", "package/__main__.py")
    done = bench.run("run", "-n", "1", "-m", "package")
    assert lines_of(done.stdout, 0) == ["__main__ package.__main__"]


@pytest.mark.long
@pytest.mark.true_start
def test_run_ends_like_python(bench: Bench) -> None:
    """Exit handlers run, threads are waited for, and spawned workers find the script."""
    script = bench.script(
        """
        import atexit, multiprocessing, sys, threading, time

        def double(x):
            return 2 * x

        def late():
            time.sleep(0.3)
            print("thread", double(3))

        if __name__ == "__main__":
            atexit.register(lambda: print("exit handler", double(4)))
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print("spawned", pool.map(double, [1, 2]))
            threading.Thread(target=late).start()
            sys.stdout.write("no newline")
        """
    )
    done = bench.run("run", "-n", "1", script)
    assert done.returncode == 0, done.stderr
    assert lines_of(done.stdout, 0) == ["spawned [2, 4]", "no newlinethread 6", "exit handler 8"]


@pytest.mark.long
@pytest.mark.true_start
def test_run_shows_the_program_none_of_the_launchers_libraries(bench: Bench) -> None:
    bench.script("NAME = 'mine'", "folder/cloudpickle.py")
    text = "import cloudpickle, sys; print(cloudpickle.NAME, 'rich' in sys.modules)"
    done = bench.run("run", "-n", "1", bench.script(text, "folder/script.py"))
    assert lines_of(done.stdout, 0) == ["mine False"], done.stderr


def test_run_ranks_draw_different_random_numbers(bench: Bench) -> None:
    """A fork copies the state of generators that no one seeded."""
    script = bench.script(
        "import random, numpy; print(random.random()); print(numpy.random.random())"
    )
    done = bench.run("run", "-n", "2", script)
    assert len(set(lines_of(done.stdout, 0) + lines_of(done.stdout, 1))) == 4, done.stdout


ALL_REDUCE = """
    import sys
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    print(f"sum {total.item()}", flush=True)
    """


def test_runs_at_once_dont_collide(bench: Bench) -> None:
    script = bench.script(ALL_REDUCE)
    runs = [bench.start("run", "-n", 2, script) for _ in range(2)]
    for run in runs:
        out, err = run.communicate(timeout=60)
        assert run.returncode == 0, err
        assert lines_of(out, 0) == lines_of(out, 1) == ["sum 3.0"]


@pytest.mark.long
def test_the_same_script_runs_under_torchrun(bench: Bench) -> None:
    torchrun = Path(sys.executable).with_name("torchrun")
    done = subprocess.run(
        [torchrun, "--standalone", "--nproc-per-node=2", bench.script(ALL_REDUCE)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.count("sum 3.0") == 2, done.stderr


def test_nothing_listens_beyond_loopback(bench: Bench) -> None:
    script = bench.script(ALL_REDUCE + "\n    import time; time.sleep(60)")
    run = bench.start("run", "-n", 2, script)
    assert run.stdout is not None
    assert "sum" in run.stdout.readline()
    assert "sum" in run.stdout.readline()
    listening = [
        connection.laddr.ip
        for process in bench.processes()
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 2  # one of each rank's Gloo
    assert set(listening) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    run.terminate()


def test_threads_default_to_a_share_of_the_cores(bench: Bench) -> None:
    cores = len(os.sched_getaffinity(0))
    assert check_num_threads(None, 1) == cores
    script = bench.script("import torch; print(torch.get_num_threads())")
    done = bench.run("run", "-n", cores + 1, script)
    assert lines_of(done.stdout, cores) == ["1"], done.stderr


@pytest.mark.true_start
def test_help_answers_without_torch() -> None:
    code = "import sys; sys.argv = ['lockstep', 'run', '--help']; import lockstep.cli as cli\n"
    code += "try: cli.main()\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--nprocs" in done.stdout
    assert "lockstep run -n 2 train.py" in done.stdout


@pytest.mark.true_start
@pytest.mark.parametrize(
    ("options", "flags"),
    [(["-P"], "0 True"), pytest.param(["-OO", "-P"], "2 True", marks=pytest.mark.long)],
)
def test_ranks_have_the_interpreters_options(bench: Bench, options: list[str], flags: str) -> None:
    script = bench.script("import sys; print(sys.flags.optimize, sys.flags.safe_path)")
    command = [sys.executable, *options, "-m", "lockstep", "run", "-n", "1", script]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == f"[rank 0] {flags}\n"


def test_version(bench: Bench) -> None:
    done = bench.run("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("lockstep ")


@pytest.mark.long
def test_run_with_its_standard_streams_closed(bench: Bench) -> None:
    script = bench.script("print('out'); open('done', 'w').write('yes')")
    command = f"exec {sys.executable} -m lockstep run -n 1 {script} >&- 2>&- <&-"
    done = subprocess.run(["sh", "-c", command], cwd=bench.directory, timeout=100, check=False)
    assert done.returncode == 0
    assert (bench.directory / "done").read_text() == "yes"


@pytest.mark.long
def test_more_ranks_than_the_system_allows(bench: Bench) -> None:
    script = bench.script("import time; time.sleep(1000)")
    command = f"ulimit -n 64; exec {sys.executable} -m lockstep run -n 100 {script}"
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 2
    assert "Too many open files" in done.stderr
    assert "ulimit -n" in done.stderr
    assert bench.processes() == []


def test_run_keeps_what_the_ranks_tell_each_other_from_other_users(bench: Bench) -> None:
    script = bench.script(
        """
        import os, subprocess
        import torch.distributed as dist
        import lockstep

        world = lockstep.init()
        path = os.environ["LOCKSTEP_STORE"].partition(":")[2]
        assert b"secret" in open(path, "rb").read()
        if os.getuid() == 0:
            other = subprocess.run(["cat", path], user=65534, capture_output=True, text=True)
            assert "Permission denied" in other.stderr, other
        dist.barrier()
        """
    )
    done = bench.run("run", "-n", 2, script)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "join",
    [
        "dist.init_process_group('shm')",
        "dist.init_process_group('shm', init_method='tcp://localhost:' + os.environ['MASTER_PORT'],"
        " rank=int(os.environ['RANK']), world_size=2)",
        "lockstep.init()",
    ],
)
def test_ranks_of_one_host_meet_where_nobody_listens(bench: Bench, join: str) -> None:
    """Any user could connect to a port of the launcher or a rank, and fill its memory."""
    script = bench.script(
        f"""
        import os, psutil, torch, torch.distributed as dist, lockstep

        for _ in range(2):
            {join}
            total = torch.tensor(float(dist.get_rank() + 1))
            dist.all_reduce(total)
            for process in (psutil.Process(), psutil.Process().parent()):
                assert process.net_connections() == [], process
            print(total.item())
            dist.destroy_process_group()
        """
    )
    done = bench.run("run", "-n", 2, script)
    assert done.returncode == 0, done.stderr
    assert [lines_of(done.stdout, rank) for rank in range(2)] == 2 * [["3.0", "3.0"]]


@pytest.mark.long
def test_programs_open_what_they_like_at_the_port_of_the_run(bench: Bench) -> None:
    """Also processes that a rank starts, which know nothing of its store."""
    script = bench.script(
        """
        import subprocess, sys

        child = "import torch.distributed as dist; dist.init_process_group('gloo'); "
        child += "print(dist.get_world_size()); dist.barrier()"
        subprocess.run([sys.executable, "-c", child], check=True)
        """
    )
    done = bench.run("run", "-n", 2, script)
    assert done.returncode == 0, done.stderr
    assert [lines_of(done.stdout, rank) for rank in range(2)] == [["2"], ["2"]]
