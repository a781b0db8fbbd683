"""What each starter leaves in the environment, and what we make of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.errors import InitError
from lockstep.world import (
    Placement,
    Starter,
    choose_backend,
    choose_device,
    detect,
    num_visible_gpus,
    rank_environment,
)

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1722613761",
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "3"}
SLURM = {
    "SLURM_PROCID": "5", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "7", "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "42", "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[003-005,9],login",
}  # fmt: skip
# As SLURM 22.05.8 sets them: 'srun -N 2 -n 4', on its second host.
SRUN = {
    "SLURM_CPUS_ON_NODE": "1", "SLURM_GTIDS": "3", "SLURM_JOBID": "1", "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_NODELIST": "n[1-2]", "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_STEPID": "0", "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_TASKS_PER_NODE": "3,1",
}  # fmt: skip
# The script of 'sbatch --nodes=2 --ntasks-per-node=2'.
SBATCH = {
    "SLURM_GTIDS": "0", "SLURM_JOB_ID": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2", "SLURM_NODEID": "0", "SLURM_NODELIST": "n[1-2]", "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip
# The shell of 'salloc -N 2 -n 4' on a host of the job (use_interactive_step), a step of one task.
SALLOC = {
    "SLURM_JOB_ID": "5", "SLURM_LOCALID": "0", "SLURM_NNODES": "2", "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEPID": "4294967290",
    "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1",
}  # fmt: skip


RUN = Placement(Starter.LOCKSTEP, 1, 2, 1, 2, ("127.0.0.1", 4321), "abc", agent_hosts_store=True)


def test_nothing_started_it() -> None:
    assert detect({}) == Placement(Starter.NOTHING)


def test_lockstep_run_is_read_back_as_it_was_written() -> None:
    written = rank_environment(RUN, num_threads=3)
    assert written["OMP_NUM_THREADS"] == "3"
    assert "GROUP_WORLD_SIZE" not in written
    assert detect(written) == RUN
    written = rank_environment(RUN, 3, node=1, num_nodes=2)
    assert (written["GROUP_RANK"], written["GROUP_WORLD_SIZE"]) == ("1", "2")


def test_the_store_of_lockstep_run_is_not_that_of_a_torchrun_inside_it() -> None:
    written = rank_environment(replace(RUN, store_path="/proc/1/fd/5"), num_threads=3)
    assert written["LOCKSTEP_STORE"] == "4321:/proc/1/fd/5"
    assert detect(written).store_path == "/proc/1/fd/5"
    assert detect(written | TORCHRUN).store_path is None


def test_torchrun() -> None:
    assert detect(TORCHRUN) == Placement(
        Starter.TORCHRUN, 3, 4, 1, 2, ("node0", 29500), "none", agent_hosts_store=True
    )


def test_torchs_variables_set_by_hand_leave_the_local_rank_open() -> None:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    place = detect({name: TORCHRUN[name] for name in names})
    assert (place.rank, place.local_rank, place.local_world_size) == (3, None, None)
    assert not place.agent_hosts_store


def test_open_mpi() -> None:
    assert detect(OPEN_MPI) == Placement(Starter.OPEN_MPI, 1, 2, 1, 2, None, "1722613761")


def test_mpich() -> None:
    assert detect(MPICH) == Placement(Starter.MPICH, 1, 3, 1, 3)


def test_mpi_with_an_address_given() -> None:
    address = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    assert detect(OPEN_MPI | address).master == ("10.0.0.1", 1234)
    assert detect(MPICH | address).master == ("10.0.0.1", 1234)


def test_slurm_on_several_hosts() -> None:
    place = detect(SLURM)
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (5, 7, 1, 2)
    assert place.master is not None
    host, port = place.master
    assert host == "gpu003"
    assert 20_000 <= port < 30_000
    assert port == detect(SLURM | {"SLURM_PROCID": "0"}).master[1], "the same on every rank"
    assert port != detect(SLURM | {"SLURM_STEP_ID": "1"}).master[1], "another for another step"


def test_slurm_as_it_is() -> None:
    place = detect(SRUN)
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (3, 4, 0, 1)
    assert place.master is not None
    assert place.master[0] == "n1"
    assert detect(SBATCH).starter is Starter.NOTHING
    shell = detect(SALLOC)
    assert (shell.rank, shell.world_size, shell.local_rank, shell.on_one_host) == (0, 1, 0, True)


def test_slurm_on_one_host_needs_no_port() -> None:
    place = detect(SLURM | {"SLURM_STEP_TASKS_PER_NODE": "7", "SLURM_NODEID": "0"})
    assert place.on_one_host
    assert place.master is None
    assert place.job_id == "42.0"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("n[1-3]", "n1"),
        ("n[007,9]-ib,x", "n007-ib"),
        ("n7.x.org", "n7.x.org"),
    ],
)
def test_first_host_of_a_slurm_list(nodes: str, first: str) -> None:
    assert detect(SLURM | {"SLURM_STEP_NODELIST": nodes}).master[0] == first


@pytest.mark.parametrize(("gpus", "is_alone"), [("1", True), ("a100:1", True), ("2", False)])
def test_slurm_tells_of_a_gpu_for_each_task(gpus: str, is_alone: bool) -> None:
    assert detect(SLURM | {"SLURM_GPUS_PER_TASK": gpus}).one_device_per_task is is_alone


def test_the_batch_script_of_a_slurm_job_is_no_rank() -> None:
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "7", "SLURM_JOB_ID": "42"}
    assert detect(batch).starter is Starter.NOTHING


def test_the_innermost_starter_wins() -> None:
    ours = rank_environment(RUN, num_threads=1)
    assert detect(SLURM | MPICH).starter is Starter.MPICH
    assert detect(SLURM | MPICH | TORCHRUN).starter is Starter.TORCHRUN
    assert detect(SLURM | TORCHRUN | ours).starter is Starter.LOCKSTEP


@pytest.mark.parametrize("lacking", ["MASTER_ADDR", "MASTER_PORT"])
def test_half_of_torchs_variables_is_an_error(lacking: str) -> None:
    environ = {name: value for name, value in TORCHRUN.items() if name != lacking}
    with pytest.raises(InitError, match=f"not {lacking}"):
        detect(environ)


@pytest.mark.parametrize("value", ["", "two", "-1", "1.5"])
def test_what_is_no_number_is_named(value: str) -> None:
    with pytest.raises(InitError, match="WORLD_SIZE is "):
        detect(TORCHRUN | {"WORLD_SIZE": value})


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK"])
def test_a_rank_outside_the_world_is_an_error(name: str) -> None:
    with pytest.raises(InitError, match=f"{name} is 9"):
        detect(TORCHRUN | {name: "9"})


def test_more_ranks_on_a_host_than_in_the_world_are_an_error() -> None:
    with pytest.raises(InitError, match=r"LOCAL_WORLD_SIZE is 8, but .* the world of 4"):
        detect(TORCHRUN | {"LOCAL_WORLD_SIZE": "8"})


@pytest.mark.parametrize(
    ("visible", "num"), [(None, 8), ("", 0), ("0,3", 2), ("GPU-a, GPU-b ,", 2), ("0,1,2,9,10", 5)]
)
def test_gpus_that_are_left_visible(visible: str | None, num: int) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert num_visible_gpus(environ, 8) == num
    assert num_visible_gpus(environ, 0) == 0


@pytest.mark.parametrize(
    ("local_rank", "local_world_size", "num_devices", "per_task", "device"),
    [
        (0, 1, 0, False, "cpu"),
        (0, 1, 1, False, "cuda:0"),
        (1, 2, 2, False, "cuda:1"),
        (1, 2, 8, False, "cuda:1"),
        (1, 2, 1, False, "cpu"),
        (0, 2, 1, False, "cpu"),  # not one GPU for rank 0 and the CPU for rank 1
        (1, 2, 1, True, "cuda:0"),
        (1, 2, 0, True, "cpu"),
    ],
)
def test_device(local_rank, local_world_size, num_devices, per_task, device) -> None:
    chosen = choose_device(local_rank, local_world_size, num_devices, per_task)
    assert str(chosen) == device
    assert choose_backend(chosen) == ("shm" if device == "cpu" else "cpu:gloo,cuda:nccl")
