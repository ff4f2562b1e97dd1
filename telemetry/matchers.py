r"""Matchers: conditions on labels, in the language that silences and channels share. Pure.

Theory of operation. A matcher is a label, an operator and a value:

    severity=critical,warning   the label has one of these values
    pool=lab-*                  the value starts with this prefix
    rule="Slow, at night*"      the value is literally this; \" and \\ are a quote and a backslash
    pool!=lab-*                 the value is none of these
    rule=~Hit.*                 the regular expression matches the whole value; !~ if it does not

A label that an alert does not have counts as an empty value, which is written "". Regular expressions are RE2's, whose
time is linear in the length of the value, so no expression can block an evaluation. Rows store the written form.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import re2

from controlplane.errors import Fault, InvalidError
from telemetry.models import RuleKind, Severity

LABELS = ("pool", "group", "replica", "rule", "kind", "severity")
OPS = ("=", "!=", "=~", "!~")
KNOWN_VALUES = {"kind": RuleKind.values, "severity": Severity.values}  # all that these labels can have
MAX_MATCHERS = 20  # in one list
MAX_VALUES = 20  # of one matcher
MAX_CHARS = 500  # of a matcher
HELP = (
    "One matcher per line, all of which must match: severity=critical,warning, pool!=lab-*, rule=~Hit.*. "
    f"Labels are {', '.join(LABELS)}. A final * matches any ending, =~ takes a regular expression for the whole value, "
    'and a value in "quotes" is literal.'
)
_SYNTAX = re.compile(r"\s*([a-z_]+)\s*(!=|=~|!~|=)\s*(.*?)\s*\Z", re.DOTALL)
_VALUE = re.compile(r'\s*(?:"((?:[^"\\]|\\.)*)"|([^",]*[^",\s]))\s*(?:,|\Z)', re.DOTALL)
_RE2_OPTIONS = re2.Options()
_RE2_OPTIONS.log_errors = False

MatcherInput = str | Mapping[str, Any]  # a matcher in written form, or its parts: label, op, value


@dataclass(frozen=True, slots=True)
class Value:
    """A value that a label is compared with, or a prefix of it."""

    text: str
    is_prefix: bool = False

    def matches(self, value: str) -> bool:
        return value.startswith(self.text) if self.is_prefix else value == self.text

    def __str__(self) -> str:
        if self.is_prefix:
            return f"{self.text}*"
        is_plain = bool(self.text) and self.text == self.text.strip() and not set('",') & set(self.text)
        return self.text if is_plain and self.text[0] != "~" and self.text[-1] != "*" else _quote(self.text)


@dataclass(frozen=True, slots=True)
class Matcher:
    """One condition on a label."""

    label: str
    op: str
    values: tuple[Value, ...]  # of a regular expression: one

    @classmethod
    def parse(cls, source: MatcherInput) -> Matcher:
        """A matcher from its written form, or from its parts with a literal value; ValueError says what is wrong."""
        return _validate(_parse(source))

    def matches(self, labels: Mapping[str, str]) -> bool:
        value = labels.get(self.label) or ""
        if self.op in {"=~", "!~"}:
            return (_compile(self.values[0].text).fullmatch(value) is not None) is (self.op == "=~")
        return any(candidate.matches(value) for candidate in self.values) is (self.op == "=")

    def __str__(self) -> str:
        if self.op in {"=~", "!~"}:
            pattern = self.values[0].text
            is_plain = pattern and pattern == pattern.strip() and not pattern.startswith('"')
            return f"{self.label}{self.op}{pattern if is_plain else _quote(pattern)}"
        return f"{self.label}{self.op}{','.join(map(str, self.values))}"


def _parse(source: MatcherInput) -> Matcher:
    if isinstance(source, str):
        return _parse_text(source)
    return Matcher(str(source.get("label", "")), str(source.get("op", "=")), (Value(str(source.get("value", ""))),))


@lru_cache(maxsize=256)
def _parse_text(text: str) -> Matcher:
    parts = _SYNTAX.match(text) if len(text) <= MAX_CHARS else None
    if parts is None or not parts[3]:
        raise ValueError('expected label=value, label!=value,value, label=~expression or label="text"')
    label, op, value = parts.groups()
    if op in {"=~", "!~"}:
        quoted = _VALUE.fullmatch(value) if value.startswith('"') else None
        return Matcher(label, op, (Value(value if quoted is None else _unquote(quoted[1])),))
    return Matcher(label, op, tuple(_parse_values(value)))


def _parse_values(text: str) -> list[Value]:
    """The values of a comma-separated list, without empty ones and duplicates."""
    values, position = list[Value](), 0
    while position < len(text):
        if (part := _VALUE.match(text, position)) is None:
            if text[position] != "," and not text[position].isspace():
                raise ValueError('expected values with commas between them, and quotes around both ends: "a, b"')
            position += 1
            continue
        quoted, bare = part.groups()
        values.append(Value(bare.removesuffix("*"), bare.endswith("*")) if quoted is None else Value(_unquote(quoted)))
        position = part.end()
    return list(dict.fromkeys(values))


def _validate(matcher: Matcher) -> Matcher:
    if matcher.label not in LABELS:
        raise ValueError(f"no alert has the label {matcher.label!r}: expected one of {', '.join(LABELS)}")
    if matcher.op not in OPS:
        raise ValueError(f"expected one of {' '.join(OPS)} after the label")
    if not 1 <= len(matcher.values) <= MAX_VALUES or len(str(matcher)) > MAX_CHARS:
        raise ValueError(f"expected 1 to {MAX_VALUES} values and at most {MAX_CHARS} characters")
    if matcher.op in {"=~", "!~"}:
        try:
            _compile(matcher.values[0].text)
        except re2.error:
            raise ValueError("expected a regular expression (RE2)") from None
    elif (known := KNOWN_VALUES.get(matcher.label)) is not None:
        for value in matcher.values:
            if not any(value.matches(name) for name in known):
                raise ValueError(f"no alert has the {matcher.label} {value}: expected one of {', '.join(known)}")
    return matcher


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _unquote(text: str) -> str:
    return re.sub(r'\\(["\\])', r"\1", text)


@lru_cache(maxsize=256)
def _compile(pattern: str) -> Any:
    return re2.compile(pattern, _RE2_OPTIONS)


def read_matchers(sources: Sequence[MatcherInput], *, may_match_all: bool) -> list[Matcher]:
    """Matchers without duplicates; InvalidError names everything that is wrong.

    ``may_match_all``: whether they may match every alert. Those of a silence may not.
    """
    matchers, faults = list[Matcher](), list[Fault]()
    if len(sources) > MAX_MATCHERS or not (sources or may_match_all):
        raise InvalidError("$.matchers", f"expected {0 if may_match_all else 1} to {MAX_MATCHERS} matchers")
    for index, source in enumerate(sources):
        try:
            matchers.append(Matcher.parse(source))
        except ValueError as error:
            faults.append(Fault(f"$.matchers[{index}]", str(error)))
    if faults:
        raise InvalidError.of(faults)
    if not may_match_all and match_all(matchers, {}):
        raise InvalidError("$.matchers", "these match every alert; expected one that needs a label")
    return list(dict.fromkeys(matchers))


def parse_stored(row: Iterable[MatcherInput]) -> list[Matcher]:
    """The matchers of a row, unchecked: a label may not exist any more."""
    return [_parse(source) for source in row]


def match_all(matchers: Iterable[Matcher], labels: Mapping[str, str]) -> bool:
    return all(matcher.matches(labels) for matcher in matchers)
