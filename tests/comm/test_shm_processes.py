"""What the kernel does to ranks that are processes: forks, ends, and limits that are reached."""

import os
import shutil
import textwrap
import uuid
from pathlib import Path

import pytest

from tests.comm.forked_ranks import run

pytestmark = pytest.mark.forks

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may do this to a process")


# Processes that end, or fork.


@pytest.mark.true_start
def test_exit_without_destroy_is_clean_and_disturbs_nobody(tmp_path: Path):
    run(
        tmp_path,
        """
        join(rank, 3)
        assert total() == 3
        # The first goes at once; the last one waits for what it will never get, and says so.
        if rank == 1:
            dist.all_reduce(torch.ones(4), async_op=True)
        if rank == 2:
            error = raised(total)
            assert isinstance(error, PeerLost) and "good order" in str(error), error
        """,
        size=3,
    )


def test_destroyed_groups_leave_nothing_and_can_be_joined_again(tmp_path: Path):
    run(
        tmp_path,
        """
        def resources():
            gc.collect()
            return len(os.listdir("/proc/self/fd")), threading.active_count()

        before = resources()
        for number in range(3):
            group = join(rank, name=f"store{number}")
            assert total() == 2
            tensor = group.empty(500_000).fill_(1)
            dist.all_reduce(tensor)
            dist.all_reduce(tensor, async_op=True).wait()
            second = dist.new_group([0, 1], backend="shm")
            dist.barrier(second)
            if rank == 0:
                dist.send(torch.ones(100_000), 1)
            else:
                dist.recv(torch.empty(100_000), 0)
            dist.destroy_process_group()
            error = raised(lambda: group.allreduce([torch.ones(1)]).wait())
            assert isinstance(error, GroupClosed), error
            del group, second, tensor, error
            assert resources() == before, (resources(), before)
        """,
    )


def test_ranks_may_come_to_a_second_group_long_after_each_other(tmp_path: Path):
    run(
        tmp_path,
        """
        # As under torchrun: the store outlives the groups, and torch names them anew.
        store = dist.FileStore(f"{folder}/kept", 2)
        for late in (0, 1, 0):
            if rank == late:
                time.sleep(0.5)
            dist.init_process_group("shm", store=store, rank=rank, world_size=2,
                                    timeout=timedelta(seconds=20))
            assert total() == 2
            dist.destroy_process_group()
        """,
    )


def test_a_group_that_is_dropped_closes_what_it_had(tmp_path: Path):
    run(
        tmp_path,
        """
        from lockstep.comm.group import SharedMemoryGroup
        from lockstep.comm.shm.transport import ShmTransport
        before = len(os.listdir("/proc/self/fd"))
        store = dist.FileStore(f"{folder}/store", 2)
        group = SharedMemoryGroup(ShmTransport(store, rank, 2, 10), "shm", timedelta(seconds=10))
        tensor = group.empty(10).fill_(1)
        group.allreduce([tensor]).wait()
        assert tensor[0] == 2
        group.barrier().wait()
        del group, tensor, store
        end = time.monotonic() + 10  # a thread that has just run a collective lets go of it last
        while len(os.listdir("/proc/self/fd")) != before:
            assert time.monotonic() < end, os.listdir("/proc/self/fd")
            gc.collect()
        """,
    )


def test_a_forked_child_does_not_hide_its_parents_death(tmp_path: Path):
    run(
        tmp_path,
        """
        join(rank)
        assert total() == 2
        if rank == 1:
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            with open(f"{folder}/child", "w") as file:
                file.write(str(child))
            total()
            os.kill(os.getpid(), signal.SIGKILL)
        total()
        error = raised(total)
        assert isinstance(error, PeerLost) and error.ranks == (1,), error
        os.kill(int(open(f"{folder}/child").read()), signal.SIGKILL)  # it is there
        """,
    )


def test_a_forked_child_is_told_that_the_group_is_not_its_own(tmp_path: Path):
    run(
        tmp_path,
        """
        group = join(rank)
        # Another thread is in a collective, and has the locks, when the process forks.
        work = dist.all_reduce(torch.ones(5), async_op=True) if rank == 0 else None
        time.sleep(0.3)
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: there are threads
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for call in (
                    total,
                    lambda: dist.all_reduce(torch.ones(1), async_op=True).wait(),
                    lambda: dist.send(torch.ones(1), 1 - rank),
                    lambda: dist.recv(torch.ones(1), 1 - rank),
                    lambda: group.empty(3),
                ):
                    error = raised(call)
                    assert isinstance(error, GroupClosed) and "fork" in str(error), error
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        # The parent's goes on.
        work = work or dist.all_reduce(torch.ones(5), async_op=True)
        work.wait()
        assert total() == 2
        dist.destroy_process_group()
        """,
    )


# Limits.


@pytest.mark.long
@pytest.mark.true_start  # a fork has memory that its parent has freed
def test_a_limit_is_an_error_that_says_so(tmp_path: Path):
    run(
        tmp_path,
        """
        from lockstep.comm.shm.transport import ShmTransport

        def check(limit, most):
            before = resource.getrlimit(limit)
            resource.setrlimit(limit, (most, before[1]))
            error = raised(lambda: ShmTransport(dist.HashStore(), 0, 1, 1))
            resource.setrlimit(limit, before)
            assert isinstance(error, (SharedMemoryFull, RendezvousFailed)), error
            assert "memory" in str(error), error
            assert ("ulimit -n" in str(error)) == (limit == resource.RLIMIT_NOFILE), error

        ShmTransport(dist.HashStore(), 0, 1, 1).leave()  # imports what it needs
        pages = int(open("/proc/self/statm").read().split()[0])
        check(resource.RLIMIT_AS, pages * resource.getpagesize() + (1 << 20))
        check(resource.RLIMIT_FSIZE, 1 << 20)
        for more in (-1, 0):
            gc.collect()
            check(resource.RLIMIT_NOFILE, len(os.listdir("/proc/self/fd")) + more)
        """,
        size=1,
    )


@pytest.mark.long
@pytest.mark.true_start
def test_a_limit_reached_later_is_told_to_all(tmp_path: Path):
    run(
        tmp_path,
        """
        def reach(limit):
            pages = int(open("/proc/self/statm").read().split()[0])
            most = {
                "RLIMIT_FSIZE": 1 << 20,
                "RLIMIT_AS": pages * resource.getpagesize() + (64 << 20),
                "RLIMIT_NOFILE": max(map(int, os.listdir("/proc/self/fd"))) + 1,
            }[limit]
            kind = getattr(resource, limit)
            resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))
            with contextlib.suppress(OSError):
                while limit == "RLIMIT_NOFILE":
                    taken.append(os.dup(0))  # into gaps
            if limit == "RLIMIT_NOFILE":
                group.empty(8_000_000)  # takes no further descriptor
                return
            error = raised(lambda: group.empty(32_000_000))
            assert isinstance(error, SharedMemoryFull), error

        for limit in ("RLIMIT_AS", "RLIMIT_FSIZE", "RLIMIT_NOFILE"):
            group, taken = join(rank, name=limit), []
            tensor = group.empty(8_000_000)
            dist.all_reduce(tensor)
            gc.collect()  # a store of torch's that ends without a descriptor aborts the process
            before = resource.getrlimit(getattr(resource, limit))
            larger = group.empty(32_000_000)
            if rank == 0:
                reach(limit)
            # To reduce it, rank 0 must map rank 1's, for which it unmaps what it had mapped before.
            try:
                dist.all_reduce(larger)
            except Exception as error:
                assert limit == "RLIMIT_AS"
                kinds = (SharedMemoryFull,) if rank == 0 else (PeerLost,)
                assert isinstance(error, kinds), error
                assert rank == 0 or "SharedMemoryFull" in str(error), error
            else:
                assert limit != "RLIMIT_AS"
            resource.setrlimit(getattr(resource, limit), before)
            for descriptor in taken:
                os.close(descriptor)
            dist.destroy_process_group()
        """,
    )


def test_memory_that_all_ranks_have_mapped_takes_no_descriptor(tmp_path: Path):
    run(
        tmp_path,
        """
        group = join(rank, size=3)
        assert total() == 3
        before = len(os.listdir("/proc/self/fd"))
        most = max(map(int, os.listdir("/proc/self/fd"))) + 100
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        tensors = []
        for _ in range(4):  # as gradients' buckets are: all made, then reduced for the first time
            tensors += [group.empty(30_000).fill_(1) for _ in range(60)]
            for tensor in tensors[-60:]:
                dist.all_reduce(tensor)
        assert all(tensor[-1] == 3 for tensor in tensors)
        assert len(os.listdir("/proc/self/fd")) == before
        def used():
            rows = open("/proc/self/smaps").read().split("memfd:lockstep")[1:]
            return sum(int(row.split("Pss:")[1].split()[0]) for row in rows)
        # What is dropped is given back though the others have it mapped yet.
        dist.barrier()
        assert used() > 20_000, used()
        dist.barrier()
        del tensors[:], tensor
        dist.barrier()
        assert used() < 10_000, used()
        dist.barrier()
        dist.destroy_process_group()
        """,
        size=3,
    )


@needs_root
@pytest.mark.long
@pytest.mark.parametrize("size", ["64m", "none"])
def test_dev_shm_may_be_small_or_absent(tmp_path: Path, size: str):
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    prepare = "mount -t tmpfs -o size=64m none /dev/shm"
    if size == "none":
        prepare = "mount -t tmpfs -o size=4k,mode=000,ro none /dev/shm"
    prefix = ("unshare", "-m", "sh", "-c", f'{prepare} && exec "$@"', "sh")
    run(
        tmp_path,
        """
        group = join(rank)
        tensors = [group.empty(5_000_000).fill_(1) for _ in range(4)]  # 80 MB
        for tensor in tensors:
            dist.all_reduce(tensor)
            assert tensor[0] == tensor[-1] == 2
        assert total(5_000_000) == 2
        assert not os.listdir("/dev/shm")
        dist.destroy_process_group()
        """,
        prefix=prefix,
    )


def _control_group() -> Path | None:
    for folder in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")):
        group = folder / f"lockstep-test-{uuid.uuid4().hex}"
        if os.geteuid() == 0 and (folder / "cgroup.procs").exists():
            try:
                group.mkdir()
            except OSError:
                continue
            if any((group / name).exists() for name in ("memory.max", "memory.limit_in_bytes")):
                return group
            group.rmdir()
    return None


def test_the_memory_limit_of_a_control_group_is_an_error_that_names_it(tmp_path: Path):
    group = _control_group()
    if group is None:
        pytest.skip("needs a control group of its own")
    try:
        (inner := group / "inner").mkdir()
        for name in ("memory.max", "memory.limit_in_bytes"):
            if (group / name).exists():
                (group / name).write_text(str(300 << 20))
        run(
            tmp_path,
            f"""
            open("{inner}/cgroup.procs", "w").write(str(os.getpid()))
            group = join(rank)
            error = raised(lambda: group.empty(200_000_000))
            assert isinstance(error, SharedMemoryFull), error
            assert "control group" in str(error), error
            tensor = group.empty(2_000_000).fill_(1)
            dist.all_reduce(tensor)
            assert tensor[-1] == 2
            dist.destroy_process_group()
            """,
        )
    finally:
        inner.rmdir()
        group.rmdir()


# Containers on one machine, of which rank 1 is in one.

_NAMESPACES = """
import ctypes
from lockstep.comm.shm.transport import ShmTransport

def unshare(*kinds):
    numbers = {"mnt": 0x20000, "uts": 0x4000000, "ipc": 0x8000000, "user": 0x10000000}
    numbers |= {"pid": 0x20000000, "cgroup": 0x2000000}
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(sum(numbers[kind] for kind in kinds)) == 0, ctypes.get_errno()

def users(process, *map):
    with open(f"/proc/{process}/uid_map", "w") as file:
        file.write(" ".join(str(number) for number in map))

"""


@needs_root
def test_ranks_in_other_namespaces_share_memory(tmp_path: Path):
    """All but the network's: also where user 0 is called 5, as in containers without root."""
    run(
        tmp_path,
        _NAMESPACES
        + textwrap.dedent("""
        if rank == 1:
            unshare("mnt", "uts", "ipc", "cgroup", "pid")
            if os.fork():  # only children are in another namespace of processes
                os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
            assert os.getpid() == 1
            unshare("user")
            users("self", 5, 0, 1)
            assert os.geteuid() == 5
        join(rank)
        assert isinstance(dist.group.WORLD.transport, ShmTransport)
        assert total() == 2
        if rank == 1:
            os._exit(0)
        """),
    )


@needs_root
def test_ranks_of_two_users_of_one_number_do_without_shared_memory(tmp_path: Path):
    """In two containers without root, both are user 0."""
    run(
        tmp_path,
        _NAMESPACES
        + textwrap.dedent("""
        port = f"{folder}/port"
        if rank == 1:
            while not os.path.exists(port):
                time.sleep(0.01)
            store = dist.TCPStore("127.0.0.1", int(open(port).read()))
            unshare("user")
            store.set("pid", str(os.getpid()))
            store.get("mapped")
            os.setuid(0)
        else:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            with open(f"{port}.new", "w") as file:
                file.write(str(store.port))
            os.rename(file.name, port)
            users(store.get("pid").decode(), 0, 1000, 1)
            store.set("mapped", "")
        assert os.geteuid() == 0
        dist.init_process_group("shm", store=store, rank=rank, world_size=2,
                                timeout=timedelta(seconds=20))
        assert not isinstance(dist.group.WORLD.transport, ShmTransport)
        assert total() == 2
        dist.barrier()  # rank 0 has the store
        """),
    )
