"""Parts of the routers' schema that rows store."""

import pytest

from controlplane.errors import InvalidError
from controlplane.schema_fields import canonical, canonical_fields, kinds_of, settings_of
from routing import schema

STRUCTS = (
    schema.Tier1,
    schema.Caps,
    schema.GroupCaps,
    schema.ConcurrencyConfig,
    schema.HealthCheck,
    schema.BreakerConfig,
    schema.GroupMatch,
    schema.Limits,
)


@pytest.mark.parametrize("struct", STRUCTS)
def test_every_setting_has_a_description(struct):
    assert [info.field for info in settings_of(struct) if not info.help] == []


def test_a_setting_has_unit_range_and_nullability():
    infos = {info.field: info for info in settings_of(schema.BreakerConfig)}
    stall, ratio = infos["stall_s"], infos["max_out_ratio"]
    assert (stall.unit, stall.low, stall.high, stall.default, stall.nullable) == ("seconds", 0.1, 600, 3.0, True)
    assert (ratio.kind, ratio.nullable, ratio.required) == ("number", False, False)
    assert [info.field for info in settings_of(schema.ConcurrencyConfig) if info.required] == ["max_running"]
    assert settings_of(schema.Caps)[-1].kind == "texts"


def test_canonical_values_have_every_default():
    assert canonical(schema.Tier1, {"boundary": "system"}, "$.tier1") == {
        "boundary": "system",
        "boundary_bytes": 1024,
        "boundary_messages": 1,
        "boundary_marker": "",
    }
    assert canonical(schema.Tier1, None, "$.tier1") is None


@pytest.mark.parametrize(
    ("value", "path", "reason"),
    [
        ({"boundary_bytes": 1}, "$.tier1.boundary_bytes", ">= 64"),
        ({"boundary": "marker"}, "$.tier1", "needs a text"),
        ({"boundry": "system"}, "$.tier1", "unknown field"),
        ([], "$.tier1", "Expected `object`"),
        ({"boundary_marker": "\ud800"}, "$.tier1", "truncated"),
        ({"boundary_bytes": float("nan")}, "$.tier1", "JSON"),
        (object(), "$.tier1", "JSON"),
    ],
)
def test_invalid_settings_are_rejected_with_a_pointer(value, path, reason):
    with pytest.raises(InvalidError) as error:
        canonical(schema.Tier1, value, "$.tier1")
    (fault,) = error.value.faults
    assert fault.path == path
    assert reason in fault.reason


def test_all_faults_are_reported_together():
    kinds = kinds_of(schema.PoolConfig, "health", "aliases")
    with pytest.raises(InvalidError) as error:
        canonical_fields(kinds, {"health": {"failures": 0}, "aliases": [{"name": "a"}], "description": "left alone"})
    assert {fault.path for fault in error.value.faults} == {"$.health.failures", "$.aliases[0]"}
