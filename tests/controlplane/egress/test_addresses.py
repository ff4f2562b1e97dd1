"""The egress rules decide by the address itself, whatever notation it is written in."""

import ipaddress

import pytest

from controlplane.egress import Rules, fleet_rules, mail_rules, provider_rules, webhook_rules
from controlplane.egress.transport import EgressDeniedError, check_addresses, resolve

FLEET = Rules(
    tuple(ipaddress.ip_network(net) for net in ("127.0.0.0/8", "::1/128", "10.0.0.0/8", "100.64.0.0/10", "fc00::/7")),
    allow_public=False,
)
WEBHOOKS = Rules((), allow_public=True)
LOCAL_WEBHOOKS = Rules((ipaddress.ip_network("127.0.0.0/8"),), allow_public=True)

PUBLIC = ["8.8.8.8", "1.1.1.1", "93.184.216.34", "2606:4700::1111", "2a00:1450:4001::1", "64:ff9b::808:808"]
PUBLIC += ["::ffff:8.8.8.8", "2002:808:808::1"]
PRIVATE = ["10.1.2.3", "100.64.0.1", "127.0.0.1", "127.255.255.254", "::1", "fc00::1", "fd12:3456::1"]
PRIVATE += ["::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::10.0.0.1", "2002:0a00:0001::1", "::127.0.0.1"]
ALWAYS_DENIED = [
    "0.0.0.0",
    "0.1.2.3",
    "169.254.169.254",  # the metadata service of most clouds
    "169.254.0.1",
    "100.100.100.200",  # Alibaba's
    "168.63.129.16",  # Azure's wire server
    "192.0.0.192",  # Oracle's
    "fd00:ec2::254",  # Amazon's, in a range that fleets live in
    "fd20:ce::254",  # Google's
    "224.0.0.1",
    "239.255.255.250",
    "255.255.255.255",
    "::",
    "fe80::1",
    "febf::1",
    "fec0::1",
    "ff02::1",
    "ff0e::1",
    "::ffff:169.254.169.254",
    "::ffff:0.0.0.0",
    "64:ff9b::169.254.169.254",
    "2002:a9fe:a9fe::1",
    "::169.254.169.254",
    "2001:0:0:0:0:0:5601:5601",  # Teredo of 169.254.169.254, its bits inverted
]
RESERVED = [
    "192.0.0.8",
    "192.0.2.1",
    "192.88.99.1",
    "198.18.0.1",
    "198.51.100.7",
    "203.0.113.9",
    "240.0.0.1",
    "172.16.0.1",
    "192.168.1.1",
    "64:ff9b:1::1",
    "100::1",
    "2001:db8::1",
    "2001:10::1",
    "3fff::1",
    "5f00::1",
    "4000::1",
]


def test_the_table_is_long_enough():
    assert len({*PUBLIC, *PRIVATE, *ALWAYS_DENIED, *RESERVED}) >= 60


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_is_allowed_for_webhooks_and_denied_for_the_fleet(address):
    assert WEBHOOKS.denial_reason(address) is None
    assert FLEET.denial_reason(address)


@pytest.mark.parametrize("address", PRIVATE)
def test_a_private_address_is_allowed_for_the_fleet_and_denied_for_webhooks(address):
    assert WEBHOOKS.denial_reason(address)
    assert FLEET.denial_reason(address) is None


@pytest.mark.parametrize("address", ALWAYS_DENIED)
def test_some_addresses_are_denied_even_if_every_network_is_allowed(address):
    everything = Rules((ipaddress.ip_network("0.0.0.0/0"), ipaddress.ip_network("::/0")), allow_public=True)
    for rules in (everything, FLEET, WEBHOOKS):
        assert rules.denial_reason(address)


@pytest.mark.parametrize("address", RESERVED)
def test_reserved_and_unallocated_addresses_are_denied(address):
    assert WEBHOOKS.denial_reason(address)
    assert FLEET.denial_reason(address)


def test_a_configured_private_network_is_allowed_for_webhooks():
    assert LOCAL_WEBHOOKS.denial_reason("127.0.0.1") is None
    assert LOCAL_WEBHOOKS.denial_reason("::ffff:127.0.0.1") is None
    assert LOCAL_WEBHOOKS.denial_reason("10.0.0.1")


def test_a_text_that_is_no_address_is_denied():
    for text in ("", "localhost", "127.1", "0x7f000001"):
        assert FLEET.denial_reason(text)


@pytest.mark.parametrize("host", ["0x7f000001", "2130706433", "017700000001", "127.1", "0", "127.0.0.1", "localhost"])
def test_a_host_is_checked_by_its_resolved_addresses(host):
    with pytest.raises(EgressDeniedError, match="not an allowed destination"):
        check_addresses(host, resolve(host, 80), WEBHOOKS)


def test_one_denied_address_denies_the_host():
    with pytest.raises(EgressDeniedError):
        check_addresses("example.com", ["93.184.216.34", "127.0.0.1"], WEBHOOKS)


def test_public_addresses_are_allowed_at_standard_ports_and_configured_networks_at_any_port(settings):
    settings.WEBHOOK_NETWORKS = [ipaddress.ip_network("10.0.0.0/8")]
    for rules, standard_ports in ((webhook_rules(), (80, 443, 8080, 8443)), (mail_rules(), (25, 465, 587, 2525))):
        assert all(rules.denial_reason("8.8.8.8", port) is None for port in standard_ports)
        assert all("port" in rules.denial_reason("8.8.8.8", port) for port in (22, 6379, 5432, 9200))
        assert rules.denial_reason("10.1.2.3", 9093) is None
        assert rules.denial_reason("127.0.0.1", standard_ports[0])


def test_the_fleets_certificate_authorities_are_trusted_for_the_fleet_only(settings):
    settings.FLEET_CA_FILE = "/fleet.pem"
    authorities = [rules().authorities for rules in (fleet_rules, webhook_rules, mail_rules, provider_rules)]
    assert authorities == ["/fleet.pem", None, None, None]
