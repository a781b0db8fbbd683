"""The network interfaces that the user lets NCCL use, looked at before NCCL does.

NCCL itself says "no socket interface found", on the host that has none, and the others wait for it.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping

from lockstep.errors import BackendUnavailable
from lockstep.world.network import is_ipv6, is_loopback

_INTERFACES, _FAMILY = "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY"
_log = logging.getLogger("lockstep")


def check_nccl_interfaces(environ: Mapping[str, str], local: Mapping[str, str]) -> list[str]:
    """Return the interfaces that NCCL_SOCKET_IFNAME leaves to NCCL; none if it isn't set.

    It has beginnings of names, with commas between them. With ``=`` before the first one they are
    whole names, and with ``^``, before that, those are meant that are not to be used.

    Args:
        environ: The variables.
        local: The addresses of this host, each with the name of its interface.

    Raises:
        BackendUnavailable: If it leaves none.

    Source: "Environment Variables" in NCCL's documentation.
    """
    given = environ.get(_INTERFACES, "")
    if len(given) < 2:  # NCCL doesn't look at it
        return []
    is_left_out = given.startswith("^")
    listed = given.removeprefix("^")
    is_whole = listed.startswith("=")
    # What follows a colon is a port, of other variables that are written like this one.
    words = [word.partition(":")[0] for word in listed.removeprefix("=").split(",") if word]

    def is_used(name: str) -> bool:
        is_listed = name in words if is_whole else name.startswith(tuple(words))
        return is_listed != is_left_out

    family = {"AF_INET": False, "AF_INET6": True}.get(environ.get(_FAMILY, ""))
    usable = {
        address: name
        for address, name in local.items()
        if family in (None, is_ipv6(address)) and not (is_ipv6(address) and is_loopback(address))
    }
    found = [name for name in dict.fromkeys(usable.values()) if is_used(name)]
    if not found:
        there = ", ".join(f"{name} ({address})" for address, name in usable.items())
        kind = "" if family is None else f" of {_FAMILY}={environ[_FAMILY]}"
        raise BackendUnavailable(
            f"{_INTERFACES}={given} leaves NCCL no network interface of host "
            f"{socket.gethostname()} with an address{kind}. It has {there or 'none'}. Let the "
            "variable name one of them or how it begins, or leave it out."
        )
    _log.info("%s=%s: NCCL listens on %s", _INTERFACES, given, " or ".join(found))
    return found
