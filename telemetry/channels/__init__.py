"""Channels deliver alerts; ``KINDS`` are the kinds of channels."""

from telemetry.channels.alertmanager import ALERTMANAGER
from telemetry.channels.base import ChannelKind
from telemetry.channels.email import EMAIL
from telemetry.channels.pagerduty import PAGERDUTY
from telemetry.channels.slack import SLACK
from telemetry.channels.webhook import WEBHOOK

KINDS: dict[str, ChannelKind] = {kind.name: kind for kind in (EMAIL, SLACK, PAGERDUTY, ALERTMANAGER, WEBHOOK)}
