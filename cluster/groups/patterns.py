"""Patterns of topic names, matched in a time that no pattern can blow up. (Pure.)

The pattern of a subscription is matched on the event loop of a node, so a backtracking library
cannot be used: `(a+)+b` would stop the node. Here a pattern becomes an automaton that follows all
ways at once. A name costs at most its length times the size of the pattern.

    literals, .           a character of names (A-Z a-z 0-9 . _ -); others never match
    \\.  \\d \\w \\D \\W      a character as it is; classes
    [a-z0-9]  [^-._]      sets
    ( )  (?: )  |         groups and alternatives
    *  +  ?  {2}  {1,3}   repeats; {2,} as well, and a ? behind them changes nothing

The whole name has to match, so ^ in front and $ at the end are allowed and change nothing. All
other features of regular expressions are refused.
"""

from typing import NamedTuple

from raftq.client.common.errors import InvalidArgument

_DIGITS = frozenset("0123456789")
_WORD = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_") | _DIGITS
_ALL = _WORD | frozenset(".-")
_CLASSES = {"d": _DIGITS, "w": _WORD, "D": _ALL - _DIGITS, "W": _ALL - _WORD}
_SPECIAL = "*+?{"

STATES_MAX = 2048
REPEATS_MAX = 255
"""Longer than any name."""
DEPTH_MAX = 50
_KNOWN_MAX = 4096

Letters = frozenset[str]


class _Repeat(NamedTuple):
    node: "_Node"
    low: int
    high: int | None


class _Either(NamedTuple):
    nodes: "tuple[_Node, ...]"


class _Sequence(NamedTuple):
    nodes: "tuple[_Node, ...]"


_Node = Letters | _Repeat | _Either | _Sequence


class Pattern:
    """A pattern, ready to be matched."""

    def __init__(self, text: str) -> None:
        node = _Parser(text).parse()
        # A state is the letters that lead on and the next states, or (None) the states to enter
        # without a letter.
        self._states: list[tuple[Letters | None, tuple[int, ...]]] = [(frozenset(), ())]
        start = self._build(node, 0)
        self._start = self._closure((start,))
        self._known: dict[tuple[frozenset[int], str], frozenset[int]] = {}

    def matches(self, name: str) -> bool:
        """Report whether the whole name matches."""
        at, known = self._start, self._known
        for letter in name:
            after = known.get((at, letter))
            if after is None:
                if len(known) >= _KNOWN_MAX:
                    known.clear()
                after = known[at, letter] = self._step(at, letter)
            if not after:
                return False
            at = after
        return 0 in at

    def _step(self, at: frozenset[int], letter: str) -> frozenset[int]:
        reached = []
        for state in at:
            letters, ways = self._states[state]
            if letters is not None and letter in letters:
                reached.append(ways[0])
        return self._closure(tuple(reached))

    def _closure(self, states: tuple[int, ...]) -> frozenset[int]:
        """Return the states reachable from these without a letter; only those that need a
        letter, or end."""
        seen: dict[int, None] = dict.fromkeys(states)
        todo = list(seen)
        while todo:
            letters, ways = self._states[todo.pop()]
            if letters is None:
                for way in ways:
                    if way not in seen:
                        seen[way] = None
                        todo.append(way)
        return frozenset(state for state in seen if self._states[state][0] is not None)

    def _add(self, letters: Letters | None, ways: tuple[int, ...]) -> int:
        if len(self._states) >= STATES_MAX:
            raise InvalidArgument("the pattern is too large with all its repeats")
        self._states.append((letters, ways))
        return len(self._states) - 1

    def _build(self, node: _Node, after: int) -> int:
        """Return the state from which the node leads to `after`."""
        if isinstance(node, frozenset):
            return self._add(node, (after,))
        if isinstance(node, _Sequence):
            for part in reversed(node.nodes):
                after = self._build(part, after)
            return after
        if isinstance(node, _Either):
            return self._add(None, tuple(self._build(part, after) for part in node.nodes))
        if node.high is None:
            loop = self._add(None, ())
            self._states[loop] = (None, (self._build(node.node, loop), after))
            after = loop
        else:
            end = after
            for _ in range(node.high - node.low):
                after = self._add(None, (self._build(node.node, after), end))
        for _ in range(node.low):
            after = self._build(node.node, after)
        return after


class _Parser:
    """Recursive descent, one method per kind of part."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def parse(self) -> _Node:
        if self._text.startswith("^"):
            self._at = 1
        node = self._either()
        if self._peek() == "$" and self._at == len(self._text) - 1:
            self._at += 1
        if self._at < len(self._text):
            raise self._bad(f"{self._peek()!r} is not expected")
        return node

    def _bad(self, why: str) -> InvalidArgument:
        return InvalidArgument(f"pattern {self._text[:100]!r}: {why} at {self._at}")

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _next(self) -> str:
        found = self._peek()
        if not found:
            raise self._bad("it ends too early")
        self._at += 1
        return found

    def _skip(self, text: str) -> bool:
        if self._text.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _either(self) -> _Node:
        nodes = [self._sequence()]
        while self._skip("|"):
            nodes.append(self._sequence())
        return nodes[0] if len(nodes) == 1 else _Either(tuple(nodes))

    def _sequence(self) -> _Node:
        nodes: list[_Node] = []
        while (found := self._peek()) and found not in "|)":
            if found == "$" and self._at == len(self._text) - 1:
                break
            nodes.append(self._repeats(self._one()))
        return _Sequence(tuple(nodes))

    def _one(self) -> _Node:
        found = self._next()
        if found == "(":
            return self._group()
        if found == "[":
            return self._set()
        if found == ".":
            return _ALL
        if found == "\\":
            return self._escaped()
        if found in "*+?{}^$]":
            self._at -= 1
            raise self._bad(f"{found!r} is not expected")
        return frozenset(found)

    def _group(self) -> _Node:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise self._bad("its groups are too deep")
        if self._skip("?") and not self._skip(":"):
            raise self._bad("such groups are not offered")
        node = self._either()
        if not self._skip(")"):
            raise self._bad("a group is not closed")
        self._depth -= 1
        return node

    def _escaped(self) -> Letters:
        found = self._next()
        if found in _CLASSES:
            return _CLASSES[found]
        if found.isalnum():
            raise self._bad(f"\\{found} is not offered")
        return frozenset(found)

    def _set(self) -> Letters:
        is_negated = self._skip("^")
        first, found = self._at, set[str]()
        while True:
            low = self._next()
            if low == "]" and self._at > first + 1:
                break
            letters = self._escaped() if low == "\\" else frozenset(low)
            if len(letters) == 1 and self._peek() == "-" and self._text[self._at + 1 :][:1] != "]":
                self._at += 1
                high = self._next()
                end = next(iter(self._escaped())) if high == "\\" else high
                (begin,) = letters
                if begin > end:
                    raise self._bad(f"the range {begin}-{end} is empty")
                letters = frozenset(letter for letter in _ALL if begin <= letter <= end)
            found |= letters
        return _ALL - found if is_negated else frozenset(found)

    def _repeats(self, node: _Node) -> _Node:
        bounds = self._bounds()
        if bounds is None:
            return node
        self._skip("?")
        if self._peek() and self._peek() in _SPECIAL:
            raise self._bad("a repeat is repeated")
        return _Repeat(node, *bounds)

    def _bounds(self) -> tuple[int, int | None] | None:
        if self._skip("*"):
            return 0, None
        if self._skip("+"):
            return 1, None
        if self._skip("?"):
            return 0, 1
        if not self._skip("{"):
            return None
        end = self._text.find("}", self._at)
        low, comma, high = self._text[self._at : max(end, self._at)].partition(",")
        numbers = [number for number in (low, high) if number]
        if (
            end < 0
            or not all(number.isascii() and number.isdecimal() for number in numbers)
            or not numbers
        ):
            raise self._bad("a repeat is {2}, {2,} or {1,3}")
        if any(len(number) > 3 or int(number) > REPEATS_MAX for number in numbers):
            raise self._bad(f"more than {REPEATS_MAX} repeats")
        self._at = end + 1
        least = int(low or 0)
        most = (int(high) if high else None) if comma else least
        if most is not None and most < least:
            raise self._bad(f"a repeat of {least} to {most}")
        return least, most
