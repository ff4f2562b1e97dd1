r"""Which alerts are meant: conditions on labels, in the one language that silences and channels share. Pure.

Theory of operation. A condition is a label, an operator and a value, written as people read it:

    severity=critical,warning   the label is one of these
    pool=lab-*                  it begins so
    rule="Slow, at night*"      it is this, to the letter; \" and \\ stand for a quote and a backslash
    pool!=lab-*                 it is none of these
    rule=~Hit.*                 a pattern fits the whole of it; !~ where it does not

An alert that lacks a label has it as an empty text, which is written "". Patterns are RE2's, whose time is linear in
the value's length, so that no pattern of anybody's can stop an evaluation. Rows keep the written form; silences
of before kept parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import re2

from controlplane.errors import Fault, InvalidError

LABELS = ("pool", "group", "replica", "rule", "kind", "severity")  # those that alerts have
OPS = ("=", "!=", "=~", "!~")
MOST = 20  # conditions, and values of one
LONGEST = 500  # characters of a condition
HELP = (
    "One condition a line, all of which must hold: severity=critical,warning, pool!=lab-*, rule=~Hit.*. "
    f"Labels are {', '.join(LABELS)}; * stands for any ending, =~ takes a pattern for the whole value, and what is in "
    '"quotes" is meant to the letter.'
)
_SYNTAX = re.compile(r"\s*([a-z_]+)\s*(!=|=~|!~|=)\s*(.*?)\s*\Z", re.DOTALL)
_VALUE = re.compile(r'\s*(?:"((?:[^"\\]|\\.)*)"|([^",]*[^",\s]))\s*(?:,|\Z)', re.DOTALL)
_QUIET = re2.Options()
_QUIET.log_errors = False

Given = str | Mapping[str, Any]  # a condition as it is written, or its parts: label, op, value


@dataclass(frozen=True, slots=True)
class Value:
    """What a label is compared with: a text, or the beginning of one."""

    text: str
    is_beginning: bool = False

    def fits(self, found: str) -> bool:
        """Whether a label's value is this."""
        return found.startswith(self.text) if self.is_beginning else found == self.text

    def __str__(self) -> str:
        if self.is_beginning:
            return f"{self.text}*"
        plain = bool(self.text) and self.text == self.text.strip() and not set('",') & set(self.text)
        return self.text if plain and self.text[0] != "~" and self.text[-1] != "*" else _quoted(self.text)


@dataclass(frozen=True, slots=True)
class Matcher:
    """One condition."""

    label: str
    op: str
    values: tuple[Value, ...]  # one alone of a pattern

    @classmethod
    def of(cls, given: Given) -> Matcher:
        """What is written, or its parts (of which the value is meant to the letter); ValueError says what is wrong."""
        if isinstance(given, str):
            return _checked(_parsed(given))
        return _checked(_of_parts(given))

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Whether labels meet it."""
        found = labels.get(self.label) or ""
        if self.op in {"=~", "!~"}:
            return (_compiled(self.values[0].text).fullmatch(found) is not None) is (self.op == "=~")
        return any(value.fits(found) for value in self.values) is (self.op == "=")

    def __str__(self) -> str:
        if self.op in {"=~", "!~"}:
            pattern = self.values[0].text
            is_plain = pattern and pattern == pattern.strip() and not pattern.startswith('"')
            return f"{self.label}{self.op}{pattern if is_plain else _quoted(pattern)}"
        return f"{self.label}{self.op}{','.join(map(str, self.values))}"


def _of_parts(given: Mapping[str, Any]) -> Matcher:
    return Matcher(str(given.get("label", "")), str(given.get("op", "=")), (Value(str(given.get("value", ""))),))


@lru_cache(maxsize=256)
def _parsed(written: str) -> Matcher:
    found = _SYNTAX.match(written) if len(written) <= LONGEST else None
    if found is None or not found[3]:
        raise ValueError('expected label=value, label!=value,value, label=~pattern or label="text"')
    label, op, value = found.groups()
    if op in {"=~", "!~"}:
        whole = _VALUE.fullmatch(value) if value.startswith('"') else None
        return Matcher(label, op, (Value(value if whole is None else _unquoted(whole[1])),))
    return Matcher(label, op, tuple(_values(value)))


def _values(written: str) -> list[Value]:
    """The values of a list with commas; empty ones are left out."""
    found, place = list[Value](), 0
    while place < len(written):
        if (part := _VALUE.match(written, place)) is None:
            if written[place] != "," and not written[place].isspace():
                raise ValueError('expected values with commas between them, and quotes around both ends: "a, b"')
            place += 1
            continue
        quoted, bare = part.groups()
        if quoted is not None:
            found.append(Value(_unquoted(quoted)))
        else:
            found.append(Value(bare.removesuffix("*"), bare.endswith("*")))
        place = part.end()
    return list(dict.fromkeys(found))


def _checked(matcher: Matcher) -> Matcher:
    if matcher.label not in LABELS:
        raise ValueError(f"no alert has the label {matcher.label!r}: expected one of {', '.join(LABELS)}")
    if matcher.op not in OPS:
        raise ValueError(f"expected one of {' '.join(OPS)} behind the label")
    if not 1 <= len(matcher.values) <= MOST or len(str(matcher)) > LONGEST:
        raise ValueError(f"expected 1 to {MOST} values, and {LONGEST} characters at most")
    if matcher.op in {"=~", "!~"}:
        try:
            _compiled(matcher.values[0].text)
        except re2.error:
            raise ValueError("this is no pattern") from None
    return matcher


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _unquoted(text: str) -> str:
    return re.sub(r'\\(["\\])', r"\1", text)


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> Any:
    """A pattern; re2.error for what is none."""
    return re2.compile(pattern, _QUIET)


def read_matchers(given: Sequence[Given], *, everything: bool) -> list[Matcher]:
    """Conditions, each once; InvalidError names everything that is wrong.

    ``everything`` says whether they may match every alert there is and will be: a silence may not.
    """
    found, faults = list[Matcher](), list[Fault]()
    if len(given) > MOST or not (given or everything):
        raise InvalidError("$.matchers", f"expected {0 if everything else 1} to {MOST} conditions")
    for place, one in enumerate(given):
        try:
            found.append(Matcher.of(one))
        except ValueError as error:
            faults.append(Fault(f"$.matchers[{place}]", str(error)))
    if faults:
        raise InvalidError.of(faults)
    if not everything and match_all(found, {}):
        raise InvalidError("$.matchers", "these match every alert; expected one that needs a label")
    return list(dict.fromkeys(found))


def stored(row: Iterable[Given]) -> list[Matcher]:
    """The conditions that a row keeps, of labels that no alert has any more, too."""
    return [_parsed(one) if isinstance(one, str) else _of_parts(one) for one in row]


def match_all(matchers: Iterable[Matcher], labels: Mapping[str, str]) -> bool:
    """Whether labels meet all of them."""
    return all(matcher.holds(labels) for matcher in matchers)
