"""Entity tags: which version of an object somebody looked at, and whether it is still the present one.

A tag is a digest of what is shown. Where some of that is merely observed, such as when a rule was last evaluated, it
has two halves, ``"wanted.observed"``: a change is refused only if what people decide has moved on, while
``If-None-Match`` compares the whole.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from rest_framework.request import Request
from rest_framework.utils.encoders import JSONEncoder

_written = re.compile(r'(W/)?("[^"]*")')
ANY = "*"


def tag_of(shown: Mapping[str, Any], observed: Collection[str] = ()) -> str:
    """The strong entity tag of a representation, quotes included; its own field ``etag`` does not count."""
    wanted = digest_of({name: value for name, value in shown.items() if name not in {*observed, "etag"}})
    if not observed:
        return f'"{wanted}"'
    return f'"{wanted}.{digest_of({name: shown.get(name) for name in observed})}"'


def digest_of(shown: object) -> str:
    """96 bits of SHA-256 over the JSON, in hex."""
    text = json.dumps(shown, sort_keys=True, cls=JSONEncoder)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def is_asked_for(request: Request) -> bool:
    """Whether the client said which version it looked at."""
    return "If-Match" in request.headers


def still_matches(request: Request, tag: str) -> bool:
    """Whether ``If-Match`` names the present version, or any (``*``). Weak tags never match."""
    given = request.headers.get("If-Match", "")
    if given.strip() == ANY:
        return True
    return any(not weak and _wanted(one) == _wanted(tag) for weak, one in _written.findall(given))


def is_known(request: Request, tag: str) -> bool:
    """Whether ``If-None-Match`` names the present version: a 304 says all there is to say."""
    given = request.headers.get("If-None-Match", "")
    return given.strip() == ANY or any(one == tag for _, one in _written.findall(given))


def _wanted(tag: str) -> str:
    return tag.strip('"').partition(".")[0]
