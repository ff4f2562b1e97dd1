"""Which clients count as one."""

from __future__ import annotations

import pytest

from routing.proxy.router import address_of


class Peer:
    """A transport as far as it is asked."""

    def __init__(self, peername: object) -> None:
        self._peername = peername

    def get_extra_info(self, name: str) -> object:
        assert name == "peername"
        return self._peername


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("192.0.2.1", "192.0.2.1", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff::2", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("fe80::1%eth0", "fe80::2%eth1", True),
    ],
)
def test_an_ipv4_address_and_an_ipv6_network_are_one_client(one: str, other: str, same: bool) -> None:
    assert (address_of(Peer((one, 1000))) == address_of(Peer((other, 2000)))) is same


@pytest.mark.parametrize("peername", [None, "", "/run/socket", ()])
def test_a_peer_without_an_address_does_not_count(peername: object) -> None:
    assert address_of(Peer(peername)) == ""
