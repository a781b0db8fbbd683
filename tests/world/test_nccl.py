"""NCCL_SOCKET_IFNAME on hosts whose interfaces are made up; NCCL isn't needed."""

from __future__ import annotations

import logging
import socket

import pytest

from lockstep.errors import BackendUnavailable
from lockstep.world.network import check_nccl_interfaces

LOCAL = {
    "127.0.0.1": "lo",
    "10.0.0.5": "eth0",
    "10.0.1.5": "eth10",
    "172.17.0.1": "docker0",
    "::1": "lo",
    "fd00::5": "ib0",
    "fe80::5": "eth0",
}


@pytest.mark.parametrize(
    ("given", "family", "found"),
    [
        ("eth0", "", ["eth0"]),
        ("eth", "", ["eth0", "eth10"]),
        ("eth1", "", ["eth10"]),
        ("=eth1,eth0", "", ["eth0"]),
        ("ib,docker0", "", ["docker0", "ib0"]),
        ("^docker,lo", "", ["eth0", "eth10", "ib0"]),
        ("^=eth0,docker0", "", ["lo", "eth10", "ib0"]),
        ("^docker", "AF_INET6", ["ib0", "eth0"]),
        ("eth", "AF_INET6", ["eth0"]),
        ("lo", "", ["lo"]),
        ("", "", []),
        ("x", "", []),  # NCCL takes a single character for nothing
    ],
)
def test_interfaces_are_those_of_nccls_rules(
    given: str, family: str, found: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    environ = {"NCCL_SOCKET_IFNAME": given, "NCCL_SOCKET_FAMILY": family}
    with caplog.at_level(logging.INFO, logger="lockstep"):
        assert check_nccl_interfaces(environ, LOCAL) == found
    assert (f"NCCL listens on {' or '.join(found)}" in caplog.text) == bool(found)


@pytest.mark.parametrize(
    ("given", "family"),
    [
        ("enp", ""),
        ("=eth", ""),
        ("^eth,lo,docker,ib", ""),
        ("docker0", "AF_INET6"),
        ("ib0", "AF_INET"),
        ("lo", "AF_INET6"),  # NCCL leaves ::1 out
    ],
)
def test_what_fits_no_interface_is_refused_with_those_that_there_are(
    given: str, family: str
) -> None:
    environ = {"NCCL_SOCKET_IFNAME": given, "NCCL_SOCKET_FAMILY": family}
    with pytest.raises(BackendUnavailable) as raised:
        check_nccl_interfaces(environ, LOCAL)
    said = str(raised.value)
    assert f"NCCL_SOCKET_IFNAME={given} leaves NCCL no network interface" in said
    assert socket.gethostname() in said
    assert ("eth0 (10.0.0.5)" in said) == (family != "AF_INET6")
    assert ("ib0 (fd00::5)" in said) == (family != "AF_INET")
