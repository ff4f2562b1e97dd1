"""The kinds of channels there are."""

from telemetry.channels.base import ChannelKind
from telemetry.channels.webhook.channel import WEBHOOK

KINDS: dict[str, ChannelKind] = {kind.name: kind for kind in (WEBHOOK,)}
