"""A store that falls silent, at the other end of a network that is slow, and whose process waits.

An answer that comes when nobody waits for it any more is not taken for that to a later request.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta

import pytest
import torch.distributed as dist

from lockstep.world import end_on_silence
from tests.launcher.bench import until


class SlowNetwork:
    """Passes connections on to a port, and holds back the answers while it ``is_slow``."""

    def __init__(self, port: int) -> None:
        self._to, self.is_slow = port, False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._listen)

    def _start(self, work: object, *ends: socket.socket) -> None:
        self._threads.append(threading.Thread(target=work, args=ends))  # type: ignore[arg-type]
        self._threads[-1].start()

    def _listen(self) -> None:
        with suppress(OSError):
            while True:
                here = self._listener.accept()[0]
                there = socket.create_connection(("127.0.0.1", self._to))
                self._ends += here, there
                self._start(self._pass_on, here, there)
                self._start(self._pass_back, there, here)

    def _pass_on(self, here: socket.socket, there: socket.socket) -> None:
        with suppress(OSError):
            while data := here.recv(1 << 16):
                there.sendall(data)

    def _pass_back(self, there: socket.socket, here: socket.socket) -> None:
        with suppress(OSError):
            while data := there.recv(1 << 16):
                while self.is_slow:
                    time.sleep(0.01)
                here.sendall(data)

    def close(self) -> None:
        self.is_slow = False
        for end in (self._listener, *self._ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(20)
        for end in (self._listener, *self._ends):
            end.close()


@pytest.fixture(autouse=True, scope="module")
def what_torch_opens_for_good() -> None:
    """With a process's first store, torch opens a pipe that it never closes."""
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def network() -> Iterator[SlowNetwork]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("key", "value")
    network = SlowNetwork(store.port)
    yield network
    network.close()


def client_of(network: SlowNetwork, seconds: float) -> dist.TCPStore:
    options = {"is_master": False, "wait_for_workers": False, "timeout": timedelta(seconds=60)}
    client = dist.TCPStore("127.0.0.1", network.port, **options)
    assert client.get("key") == b"value"
    end_on_silence("127.0.0.1", network.port, seconds)
    return client


def test_no_late_answer_is_taken_for_another(
    network: SlowNetwork, caplog: pytest.LogCaptureFixture
) -> None:
    client = client_of(network, 1.0)
    network.is_slow, began = True, time.monotonic()
    with (
        caplog.at_level(logging.WARNING, logger="lockstep"),
        pytest.raises(dist.DistNetworkError),
    ):
        client.compare_set("key", "value", "other")
    assert time.monotonic() - began < 20
    assert f"port {network.port}, where the ranks meet, has answered nothing for 1 s" in caplog.text
    network.is_slow = False
    time.sleep(0.1)  # the answer comes
    for request in (
        lambda: client.check(["absent"]),
        lambda: client.add("number", 5),
        lambda: client.get("key"),
        lambda: client.set("key", "new"),
        lambda: client.compare_set("key", "a", "b"),
    ):
        with pytest.raises(RuntimeError):
            request()


@pytest.mark.long
def test_a_wait_goes_on_as_long_as_the_store_answers(network: SlowNetwork) -> None:
    client, other = client_of(network, 4.0), client_of(network, 4.0)
    later = threading.Timer(10.0, other.set, ("late", "there"))
    later.start()
    assert client.get("late") == b"there"
    later.join()
    assert client.add("number", 5) == 5


def test_a_watch_ends_with_its_client(network: SlowNetwork) -> None:
    before = threading.active_count()
    client = client_of(network, 60.0)
    assert threading.active_count() > before
    del client
    assert until(lambda: threading.active_count() <= before + 2)  # those of the network's own
