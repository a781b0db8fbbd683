"""The choice of addresses, from what hosts offer and reach."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from lockstep.comm import is_within_reach, within_reach
from lockstep.world import Placement, Starter, addresses, reached
from lockstep.world.network import address_towards, answering
from lockstep.world.reach import _choice, _missing, hosts_of_ranks

A = [[("10.0.0.1", 1), ("fd00::1", 2)]]
B = [[("10.0.0.2", 3), ("fd00::2", 4)]]
C = [[("fd00::3", 5)]]
ALL = dict.fromkeys(["10.0.0.1", "10.0.0.2", "fd00::1", "fd00::2", "fd00::3"], "")
NO: dict[str, str] = {}


def test_choice_prefers_the_first_address_of_the_first_host() -> None:
    assert _choice([A, B], [[NO, ALL], [ALL, NO]]) == [["10.0.0.1"], ["10.0.0.2"]]
    turned = [A[0][::-1]]
    assert _choice([turned, B], [[NO, ALL], [ALL, NO]]) == [["fd00::1"], ["fd00::2"]]


def test_choice_is_of_the_version_that_all_hosts_have() -> None:
    everything = [[ALL] * 3] * 3
    assert _choice([A, B, C], everything) == [["fd00::1"], ["fd00::2"], ["fd00::3"]]


def test_choice_takes_only_what_all_others_have_reached() -> None:
    assert _choice([A, B], [[NO, ALL], [{"10.0.0.1": "lost", "fd00::1": ""}, NO]]) == [
        ["fd00::1"],
        ["fd00::2"],
    ]
    assert _choice([A, B], [[NO, {"10.0.0.2": ""}], [{"fd00::1": ""}, NO]]) is None


def test_each_interface_has_an_address_of_its_own() -> None:
    two = [[("10.0.0.1", 1)], [("10.1.0.1", 1)]]
    others = [[("10.0.0.2", 1)], [("10.1.0.2", 1)]]
    every = [["10.0.0.1", "10.1.0.1"], ["10.0.0.2", "10.1.0.2"]]
    reached = [dict.fromkeys(each, "") for each in every]
    assert _choice([two, others], [reached, reached]) == every
    assert _choice([two, others], [reached, [{"10.0.0.1": ""}, NO]]) is None


def test_what_is_not_reached_is_told() -> None:
    ways = [[NO, {"10.0.0.2": "", "fd00::2": "No route to host"}], [{"10.0.0.1": ""}, NO]]
    assert _missing(["a", "b"], [A, B], ways) == (
        "host 1 (b) doesn't reach host 0 (a) at fd00::1 (its own address too); "
        "host 0 (a) doesn't reach host 1 (b) at fd00::2 (No route to host)"
    )
    # What is reached elsewhere isn't told beside what isn't reached at all.
    ways = [[NO, {"10.0.0.2": "lost", "fd00::2": "lost"}], [{"10.0.0.1": ""}, NO]]
    assert _missing(["a", "b"], [A, B], ways) == (
        "host 0 (a) doesn't reach host 1 (b) at 10.0.0.2 (lost) or fd00::2 (lost)"
    )
    assert "host 1 (b) has no address" in _missing(["a", "b"], [A, [[]]], [[NO, NO], [NO, NO]])


def test_places_are_tried_at_once_and_each_says_why_it_fails() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        places = [("127.0.0.1", port), ("127.0.0.2", port), ("203.0.113.9", port)]
        began = time.monotonic()
        found = answering(places, 1.0)
        assert time.monotonic() - began < 30
    assert found[places[0]] == ""
    assert found[places[1]] == "Connection refused"
    assert found[places[2]]


def test_the_first_address_that_answers_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert reached("localhost", port, 5.0) == "127.0.0.1"
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1: Connection refused"):
        reached("127.0.0.1", port, 5.0)


def test_own_address_towards_a_host() -> None:
    assert address_towards("127.0.0.1", 9) == "127.0.0.1"
    assert address_towards("no-such-host.invalid", 9) is None
    assert addresses()["127.0.0.1"] == "lo"


class Forbidden(socket.socket):
    """A socket in a sandbox that forbids those with abstract names."""

    def bind(self, address: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    connect = bind


def test_a_sandbox_that_forbids_abstract_sockets_is_a_host_as_its_kernel_tells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And not one for each rank: whether others can be reached isn't known there."""
    with within_reach() as name:
        assert is_within_reach(name)
    assert not is_within_reach(name)  # it is over
    monkeypatch.setattr("lockstep.comm.network.socket.socket", Forbidden)
    monkeypatch.setattr("lockstep.comm.network._told_apart", [])
    with within_reach() as name:
        assert name == ""
        assert is_within_reach(name)
    store, late = dist.HashStore(), timedelta(seconds=9)
    with ThreadPoolExecutor() as pool:
        places = [Placement(Starter.TORCHRUN, rank, 2, None, None) for rank in range(2)]
        found = [*pool.map(lambda place: hosts_of_ranks(store, place, late), places)]
    assert found[0] == found[1]
    assert len({*found[0]}) == 1
