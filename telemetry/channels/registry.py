"""The kinds of channels there are."""

from telemetry.channels.alertmanager.channel import ALERTMANAGER
from telemetry.channels.base import ChannelKind
from telemetry.channels.email.channel import EMAIL
from telemetry.channels.pagerduty.channel import PAGERDUTY
from telemetry.channels.slack.channel import SLACK
from telemetry.channels.webhook.channel import WEBHOOK

KINDS: dict[str, ChannelKind] = {kind.name: kind for kind in (EMAIL, SLACK, PAGERDUTY, ALERTMANAGER, WEBHOOK)}
