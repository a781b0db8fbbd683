"""A failure that a rank has heard of, and passes on before it goes."""

from __future__ import annotations

from lockstep.comm.shm.barrier import _HEADER_BYTES, Fault
from lockstep.errors import PeerLost
from tests.comm.transports import joined, meet_all


def test_who_has_heard_of_a_failure_and_leaves_is_not_blamed_where_only_it_has_told_of_it():
    fault = Fault("PeerLost", "Rank 0 has aborted the group.", [0])
    with joined(3) as teams:
        # Rank 0 stands still before it tells rank 2.
        teams[0]._barrier._sockets[1].send(bytes(_HEADER_BYTES) + fault.encode())
        told = meet_all(teams[1:2])
        teams[1].leave()
        told += meet_all(teams[2:])
        for error in told:
            assert isinstance(error, PeerLost)
            assert error.ranks == (0,)
            assert "Rank 0 has aborted the group." in str(error)
