"""``init()``: join the other ranks, by any starter, and return this one's World."""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from lockstep.arguments import as_device, check_process_group, check_type
from lockstep.comm import (
    SHM,
    THREADS,
    SingleRankGroup,
    bind_gloo,
    carries,
    rank_context,
    register_backends,
)
from lockstep.errors import BackendUnavailable, ContradictoryInit, InitError, SharedMemoryFull
from lockstep.spans import span
from lockstep.torch_private import _get_default_store
from lockstep.world.agreement import Wanted, agreed_device, uses_nccl
from lockstep.world.apart import look_at_the_end, watch_optimizers
from lockstep.world.devices import (
    carriers,
    choose_backend,
    make_current,
    usable_device,
)
from lockstep.world.environment import Placement, Starter, detect, gloo_environment, gloo_interfaces
from lockstep.world.first_step import limit_calls
from lockstep.world.main_first import first_alone
from lockstep.world.network import addresses
from lockstep.world.reach import HostsOfRun, hosts_of_ranks
from lockstep.world.rendezvous import (
    ask,
    claim,
    drop_full_stores,
    first_line,
    meet,
    roll_call,
)

if TYPE_CHECKING:
    from typing import Protocol

    class _File(Protocol):
        def write(self, text: str, /) -> object: ...
        def flush(self) -> object: ...


_log = logging.getLogger("lockstep")

DEFAULT_TIMEOUT = timedelta(minutes=10)
GLOO = "gloo"


@dataclass(frozen=True)
class World:
    """This rank among the others. ::

        world = lockstep.init()
        model.to(world.device)
        world.print(f"{world.world_size} ranks, {world.local_world_size} of them on this host")

    Attributes:
        rank: Its number, from 0 to ``world_size - 1``.
        world_size: The number of ranks.
        local_rank: Its number among the ranks on this host.
        local_world_size: The number of ranks on this host.
        device: Where this rank computes.
        process_group: The group of all ranks; None for a rank that is alone.
        starter: The program that started it.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    process_group: dist.ProcessGroup | None
    starter: Starter

    @property
    def is_main(self) -> bool:
        """Whether this is the main rank: number 0, of all hosts."""
        return self.rank == 0

    def print(
        self,
        *values: object,
        sep: str | None = " ",
        end: str | None = "\n",
        file: _File | None = None,
        flush: bool = True,
    ) -> None:
        """Print on the main rank alone, at once. The arguments are those of ``print()``."""
        if self.is_main:
            print(*values, sep=sep, end=end, file=file, flush=flush)

    def main_first(self, *, local: bool = False) -> AbstractContextManager[None]:
        """A context that the main rank goes through first: a download, a cache to be filled. ::

            with world.main_first():
                prepare("data")  # the other ranks find it there

        Every rank must enter it. The others wait before it until the main rank has left it, up to
        the timeout of ``init()``; nobody waits for them. If the main rank raises an ``Exception``
        inside, the others don't begin.

        Args:
            local: Whether the first rank of each host is main, for disks that hosts don't share.

        Raises:
            CollectiveFailed: On ranks that wait: if a main rank has failed inside, with what it
                raised; if it is lost or late (:class:`PeerLost`, :class:`CollectiveTimeout`); or
                inside of ``join()``.
        """
        is_first = (self.local_rank if local else self.rank) == 0
        return first_alone(self.process_group, is_first)


@dataclass
class RankContext:
    """The state of ``init()`` for one rank."""

    placement: Placement | None = None  # of a thread; a process's environment has it
    store: dist.Store | None = None  # where the threads of a launch meet
    num_inits: int = 0  # the number of groups that it has joined
    world: World | None = None  # the last result of init(), of the group that was default then
    seed: int | None = None  # that of lockstep.seed()
    begin_noise: Callable[[], None] | None = None  # which makes random numbers differ by rank

    def new_prefix(self) -> str:
        """A prefix for keys in a store, which outlives the groups whose ranks meet there."""
        self.num_inits += 1
        return f"lockstep/init/{self.num_inits}"


_of_process = RankContext()


def rank_state() -> RankContext:
    """The state of this rank."""
    return rank_context().init_state or _of_process


# Called with the World of each rank of this process that joins the others, on every rank.
when_joined: list[Callable[[World], None]] = []


@contextmanager
def as_rank(placement: Placement, store: dist.Store) -> Iterator[None]:
    """Let ``init()`` in this thread join the others at ``store`` as the rank of ``placement``."""
    context = rank_context()
    context.init_state = RankContext(placement, store)
    try:
        yield
    finally:
        context.init_state = None


def init(
    *,
    backend: str | None = None,
    device: torch.device | str | None = None,
    timeout: timedelta | None = None,
    first_step_timeout: timedelta | None = None,
) -> World:
    """Join the other ranks and return this one's :class:`World`.

    Every rank calls it, once, before anything else; more calls return the same World. It
    recognises ``lockstep run``, torchrun, ``srun``, ``mpiexec`` (Open MPI, MPICH), and a process
    group that exists already. Started by none of them, a process is the only rank. ::

        world = lockstep.init()
        model = lockstep.parallelize(Net().to(world.device))

    Args:
        backend: A backend of torch.distributed, such as ``"gloo"``, ``"nccl"`` or
            ``"shm"``. By default that of the accelerators (NCCL for GPUs), with Gloo for the CPU;
            on the CPU, memory that the ranks of a host share. Should that fail, all ranks go on
            with Gloo, and a warning says why; or raise, if Gloo doesn't carry the device's tensors.
        device: Where this rank computes. By default an accelerator of its own, such as
            ``cuda:local_rank``, where each host has one for each of its ranks (CUDA, ROCm, XPU,
            MPS, and what registers itself with torch), else the CPU; with fewer, a warning says so.
            Without an index, such as ``"cuda"``, that of the local rank.
        timeout: How long to wait for the other ranks, here and in each collective; 10 minutes
            by default. Another call may change it, as in a function that ``launch()`` calls.
        first_step_timeout: The same in collectives until an optimizer has stepped on this rank, as
            programs compile in the first step, and read data for the first time; by default
            ``timeout``. A process group that exists already keeps its own.

    Returns:
        The World, which doesn't change any more.

    Raises:
        RendezvousFailed: If the others can't be reached, or don't come, within ``timeout``.
        ValueError: If a timeout isn't more than 0, or torch knows no such ``device``.
        BackendUnavailable: If the ``backend`` asked for can't be used here, or the ``device``
            isn't there, or no backend carries its tensors.
        ContradictoryInit: If ``init()`` was called before, for something else.
        InitError: If the starter's environment variables make no sense.
    """
    checked_device = as_device("device", device) if device is not None else None
    check_type("backend", backend, str | None, "the name of a backend, such as 'gloo'")
    register_backends()
    _check_backend(backend)
    checked_timeout = _checked_timeout("timeout", timeout) or DEFAULT_TIMEOUT
    first = _checked_timeout("first_step_timeout", first_step_timeout)
    wanted = Wanted(backend, checked_device, checked_timeout)
    rank = rank_state()
    is_other = timeout is not None and rank.world is not None  # than that of the call before
    if rank.world is None or rank.world.process_group is not _default_group():
        world = _join_others(rank, wanted)
        for function in when_joined:
            function(world)
        if world.world_size > 1:
            watch_optimizers()
        rank.world = world
    _check_same(rank.world, wanted)
    has_made = rank.world.world_size > 1 and rank.world.starter is not Starter.PROCESS_GROUP
    if has_made and (is_other or first is not None):
        limit_calls(checked_timeout, first)
    return rank.world


def _join_others(rank: RankContext, wanted: Wanted) -> World:
    if rank.placement is not None:
        return _join_threads(rank, rank.placement, wanted)
    if dist.is_initialized():
        return _from_existing_group(wanted)
    place = detect(os.environ)
    if place.starter is not Starter.NOTHING:
        with span("wait", "init"):  # what `lockstep status` tells of a rank that waits here
            return _join(rank, place, wanted)
    device = usable_device(place, (0, 1), wanted.device)
    make_current(device)
    return _world(place, device)


def _world(place: Placement, device: torch.device, local: tuple[int, int] = (0, 1)) -> World:
    return World(place.rank, place.world_size, *local, device, _default_group(), place.starter)


def _default_group() -> dist.ProcessGroup | None:
    group = dist.group.WORLD if dist.is_initialized() else None
    # A rank that is alone has it while a communication hook runs, in which init() may be called.
    is_stand_in = isinstance(cast(object, group), SingleRankGroup)
    return None if is_stand_in else group


def group_or_all(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """``process_group`` or, if it is None, the group of all ranks: None if this rank is alone.

    Raises:
        TypeError: If it is neither None nor a process group.
    """
    if process_group is None:
        return init().process_group
    check_process_group(process_group)
    return process_group


def device_in(group: dist.ProcessGroup) -> torch.device | None:
    """The device of this rank if ``group`` is the one that it has joined by ``init()``."""
    world = rank_state().world
    return world.device if world is not None and world.process_group is group else None


def this_rank() -> int:
    """The number of this rank, which need not have joined the others."""
    context: RankContext | None = rank_context().init_state
    if context is not None and context.placement is not None:
        return context.placement.rank
    return dist.get_rank() if dist.is_initialized() else detect(os.environ).rank


def _checked_timeout(name: str, timeout: timedelta | None) -> timedelta | None:
    check_type(name, timeout, timedelta | None, "a timedelta, such as timedelta(seconds=60)")
    if timeout is not None and timeout <= timedelta(0):
        raise ValueError(
            f"{name} is {timeout!r}, but no rank can join in no time. Give a timedelta of more "
            "than 0 seconds, or leave it out to wait 10 minutes."
        )
    return timeout


def _check_backend(backend: str | None) -> None:
    known = [name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED]
    for part in backend.split(",") if backend is not None else ():
        name = part.rpartition(":")[2].lower()
        if name not in known:
            raise BackendUnavailable(
                f"There is no backend {name!r}; torch.distributed knows {', '.join(known)}."
            )


def _check_same(world: World, wanted: Wanted) -> None:
    backend, device, _ = wanted
    there = world.device
    if device not in (None, there, torch.device(there.type)):
        raise ContradictoryInit(
            f"init(device={str(device)!r}) was called on rank {world.rank}, but this rank already "
            f"computes on {there}. Call init() once, with all you want of it."
        )
    if backend is None or world.process_group is None:
        return
    used = str(dist.get_backend_config(world.process_group))
    if carriers(backend) != carriers(used):
        raise ContradictoryInit(
            f"init(backend={backend!r}) was called on rank {world.rank}, but its process group "
            f"already uses {used!r}. Call init() once, with all you want of it."
        )


def _join_threads(rank: RankContext, place: Placement, wanted: Wanted) -> World:
    device, local = wanted.device or torch.device("cpu"), (place.rank, place.world_size)
    if not dist.is_initialized():
        assert rank.store is not None
        store = dist.PrefixStore(rank.new_prefix(), rank.store)
        wanted = wanted._replace(backend=wanted.backend or THREADS, device=device)
        device = agreed_device(place, local, wanted, store)
        _create_group(place, device, wanted, store)
    return _world(place, device, local)


def _join(rank: RankContext, place: Placement, wanted: Wanted) -> World:
    store = meet(place, wanted.timeout)
    claim(store, place, wanted.timeout)
    store = dist.PrefixStore(rank.new_prefix(), store)
    local = _place_on_host(place, hosts_of_ranks(store, place, wanted.timeout))
    _choose_addresses(place, store, wanted.timeout)
    device = agreed_device(place, local, wanted, store)
    make_current(device)
    _create_group(place, device, wanted, store)
    atexit.register(_leave)
    return _world(place, device, local)


def _choose_addresses(place: Placement, store: dist.Store, timeout: timedelta) -> None:
    """Have Gloo listen where all hosts of the run reach this one, or on loopback if it is alone."""
    interface = gloo_environment()
    bind_gloo([])
    if not place.on_one_host and not (hosts := HostsOfRun(store, place, timeout)).is_one:
        chosen = hosts.agree(gloo_interfaces(os.environ))
        bind_gloo(chosen)
        local_addresses = addresses()
        names = ",".join(local_addresses.get(address, "") for address in chosen)
        _log.info("Rank %d: Gloo listens at %s (%s)", place.rank, ",".join(chosen), names)
        interface = gloo_environment(names)
    # In the environment for the children too, which are on the same host.
    for name, value in interface.items():
        os.environ.setdefault(name, value)


def _place_on_host(place: Placement, hosts: Sequence[str]) -> tuple[int, int]:
    """The local rank and world size, from the starter or else from the ranks' hosts."""
    if place.local_rank is not None and place.local_world_size is not None:
        return place.local_rank, place.local_world_size
    here = [rank for rank, host in enumerate(hosts) if host == hosts[place.rank]]
    return here.index(place.rank), len(here)


def _name_default(device: torch.device, backend: str) -> None:
    """Tell torch which backend is the first of those of the group of all ranks."""
    # It knows NCCL alone. Otherwise it warns of a missing one when the group is destroyed.
    group = dist.group.WORLD
    if group is not None and group.name() == "undefined":
        name = carriers(backend).get(device.type, "gloo")
        group._set_default_backend(dist.Backend.backend_type_map[name])


def _create_group(
    place: Placement, device: torch.device, wanted: Wanted, store: dist.Store
) -> None:
    """Create the group with the wanted backend.

    By default it is the backend for ``device`` or, if that fails on any rank, Gloo.
    """

    def create(backend: str, store: dist.Store) -> None:
        options: dict[str, Any] = {"rank": place.rank, "world_size": place.world_size}
        # A backend of ours connects NCCL with the first tensor on a device.
        has_ours = not {SHM, THREADS}.isdisjoint(carriers(backend).values())
        if uses_nccl(backend, device) and not has_ours:
            options["device_id"] = device  # NCCL connects now, so that it fails here if it does
        try:
            dist.init_process_group(backend, store=store, timeout=wanted.timeout, **options)
            _name_default(device, backend)
        except (RuntimeError, ValueError, SharedMemoryFull) as error:
            drop_full_stores(error)
            if dist.is_initialized():
                dist.destroy_process_group()
            raise BackendUnavailable(
                f"The backend {backend!r} can't be used on rank {place.rank} with {device}: "
                f"{first_line(error)} Leave 'backend' out to let lockstep choose."
            ) from error

    if wanted.backend is not None:
        return create(wanted.backend, store)
    backend = choose_backend(device)
    trouble = ""
    try:
        create(backend, dist.PrefixStore("first", store))
    except BackendUnavailable as error:
        trouble = f"on rank {place.rank}: {error}"
    # All ranks use the backend or none does: a rank that alone went on with Gloo would wait
    # there for ever. So all ranks look at the same list of errors.
    notes = roll_call(dist.PrefixStore("went", store), place, wanted.timeout, note=trouble)
    if not any(notes):
        return None
    if dist.is_initialized():
        dist.destroy_process_group()
    if not carries(GLOO, device.type):
        raise BackendUnavailable(
            f"{backend} can't be used, and Gloo carries no tensors of {device.type} in its place. "
            f"It said, {next(filter(None, notes))} Give init(device='cpu') to compute there."
        )
    if place.rank == 0:
        first = next(filter(None, notes))
        _log.warning("%s can't be used, going on with Gloo. It said, %s", backend, first)
    return create(GLOO, dist.PrefixStore("gloo", store))


def _from_existing_group(wanted: Wanted) -> World:
    group = dist.group.WORLD
    assert group is not None
    place = Placement(Starter.PROCESS_GROUP, group.rank(), group.size(), None, None)
    told = place
    with suppress(InitError):  # the group was made otherwise
        told = detect(os.environ)
    if (told.rank, told.world_size) != (place.rank, place.world_size):
        told = place
    # Environments may differ: a rank that did without the roll call, by its own, would leave the
    # others waiting. Local ranks from the environment count if all ranks have them.
    has_local = told.local_rank is not None and told.local_world_size is not None
    store = _get_default_store()
    count = partial(store.add, f"lockstep/inits/{place.rank}", 1)  # the store may outlive the group
    number = ask(place, count, wanted.timeout)
    store = dist.PrefixStore(f"lockstep/roll/{number}", store)
    notes = roll_call(store, place, wanted.timeout, f"{has_local:d}")
    if all(note == "1" for note in notes):
        place = replace(place, local_rank=told.local_rank, local_world_size=told.local_world_size)
    local = _place_on_host(place, hosts_of_ranks(store, place, wanted.timeout))
    place = replace(place, one_device_per_task=told.one_device_per_task)
    wanted = wanted._replace(backend=str(dist.get_backend_config(group)))
    device = agreed_device(place, local, wanted, store)
    if wanted.device is not None:  # otherwise the program has made one current, or will
        make_current(device)
    return _world(place, device, local)


def _leave() -> None:
    drop_full_stores()
    if dist.is_initialized():
        look_at_the_end()
        dist.destroy_process_group()
        # One of Gloo's threads may be about to release the last collective's tensor, for which
        # it needs the interpreter lock. If the interpreter is shutting down by then, that ends
        # the process ("terminate called without an active exception"), in one run of ten. It
        # takes microseconds; sleeping gives it the lock.
        time.sleep(0.02)
