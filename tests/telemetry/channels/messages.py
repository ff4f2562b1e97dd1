"""Example messages, and settings of each kind, for the tests of every channel."""

from telemetry.channels.base import Message
from telemetry.channels.enqueue import combine
from tests.telemetry.conftest import T0

ISO = T0.isoformat(timespec="seconds")
ROUTING_KEY = "0123456789abcdef" * 2


def config(kind, host, port):
    """Settings of a channel that sends to this address."""
    url = f"http://{host}:{port}/x"
    return {
        "alertmanager": {"url": url},
        "email": {"host": host, "port": port, "security": "none", "sender": "w@x.org", "recipients": "a@x.org"},
        "discord": {"url": url},
        "google_chat": {"url": f"{url}?key=k&token=t"},
        "jsm": {"endpoint": url, "api_key": "k"},
        "ntfy": {"server": f"http://{host}:{port}", "topic": "t"},
        "pagerduty": {"endpoint": url, "routing_key": ROUTING_KEY},
        "slack": {"url": url},
        "teams": {"url": url},
        "template": {"url": url},
        "webhook": {"url": url},
    }[kind]


def payload(number=7, state="firing", **changes):
    data = {
        "alert": number,
        "rule": "Hit rate drop",
        "kind": "hit_rate_drop",
        "pool": "chat",
        "state": state,
        "summary": "Hit rate of pool chat is 20.1 %, 58.9 points below its baseline of 79.0 %.",
        "labels": {"pool": "chat", "rule": "Hit rate drop", "kind": "hit_rate_drop", "severity": "critical"},
        "value_ratio": 0.201,
        "baseline_ratio": 0.79,
        "reachable_ratio": None,
        "started_at": ISO,
        "fired_at": ISO,
        "resolved_at": ISO if state == "resolved" else None,
        "detail": {
            "extra_recomputed_tokens": 532580,
            "top_replicas": [{"name": "r1", "hit_rate_ratio": 0.1, "recomputed_tokens": 9}],
            "top_groups": [],
            "onset": ISO,
        },
        "causes": [
            {"kind": "revision", "confidence": 0.9, "summary": "Revision 7 moved homes.", "advice": "Revert it."}
        ],
        "links": {"alert": f"/alerts/{number}/", "silence": "/silences/new/", "pool": "/?pool=chat"},
        **changes,
    }
    return {"type": f"alert.{state}", "timestamp": ISO, "data": data}


def message(number=7, state="firing", **changes):
    return Message("msg_1", T0, payload(number, state, **changes))


ROLLED_BACK = (
    "Revision 5 of chat was rolled back automatically: Hit rate 41.0 % (60.0 % before), "
    "baseline 61.0 % (60.0 % before): 20.0 points less than expected (certain above 4.1)."
)
ROLLOUT = Message(
    "msg_1",
    T0,
    {
        "type": "rollout.rolled_back",
        "timestamp": ISO,
        "data": {
            "state": "rollout",
            "summary": ROLLED_BACK,
            "rollout": 3,
            "policy": "chat",
            "revision": 5,
            "pool": "chat",
            "facts": [["Policy", "chat"], ["Revision", "5"]],
            "links": {"rollout": "/rollouts/3/"},
        },
    },
)


def several(*numbers, state="firing"):
    return Message("msg_1", T0, combine([payload(number, state, summary=f"Alert {number}.") for number in numbers], T0))


TEST = Message("msg_1", T0, {"type": "alert.test", "data": {"state": "test", "summary": "A test.", "path": "/alerts/"}})
NOTICE = Message(
    "msg_2",
    T0,
    {
        "type": "channel.disabled",
        "data": {"state": "notice", "summary": "Channel ops was disabled.", "path": "/channels/"},
    },
)
HOSTILE = [
    "<!channel> <!here> <@U123> <https://evil.example|click>",
    "@channel @here @everyone",
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "a\r\nBcc: victim@example.org",
    "{{ 7|add:7 }} {% load x %}",
    "\u202egnp.exe \x00\x1b[31m",
]
