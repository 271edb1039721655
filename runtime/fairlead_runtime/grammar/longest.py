r"""Grammars of llama.cpp that mean another thing where a lexer takes the longest piece of text.

llguidance reads an output in pieces, each a literal, a set of characters or a rule that refers to
no recursive one, and gives none of their characters back: where ``ws ::= [ \t\n]*`` stands before a
line end the blanks take it. llama.cpp reads characters. Owns the question whether the two differ,
and the form in which every piece is one character, whose masks take up to ten times as long.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple, cast

from llguidance.gbnf_to_lark import (
    AlternativeNode,
    ASTNode,
    GrammarParser,
    LiteralNode,
    RegexNode,
    RepetitionNode,
    RuleNode,
    RuleRefNode,
    SequenceNode,
    resolve,
)

MAX_PIECES = 300  # and rules of a grammar, and characters of a piece, that are looked at
MAX_WORK = 200_000  # looks at nodes and characters: a fifth of a second
_LAST = 0x10FFFF
_NAMED = {"n": "\n", "r": "\r", "t": "\t"}
_ANY = ((0, _LAST),)

Ranges = tuple[tuple[int, int], ...]
Spot = tuple[int, int]  # a piece's number and the place of a character in it


class TooLargeError(ValueError):
    """The grammar has more pieces than are looked at."""


class _Ends(NamedTuple):
    """The places at which a text of a node begins and ends."""

    empty: bool
    first: frozenset[int]
    last: frozenset[int]


class _Piece:
    """The texts of one piece, by Glushkov's automaton: places of characters, and what follows each.
    Counted repetitions are endless ones, which allows more.
    """

    def __init__(self, node: ASTNode) -> None:
        self.chars: list[Ranges] = []
        self.follow: list[set[int]] = []
        self.ends = self._ends(node)

    def _ends(self, node: ASTNode) -> _Ends:
        match node:
            case LiteralNode():
                parts = [self._place(((ord(char), ord(char)),)) for char in _text(node.value)]
                return self._sequence(parts)
            case RegexNode():
                return self._place(_ranges(node.rx))
            case RuleRefNode():
                return self._ends(_target(node).alternatives)
            case RepetitionNode():
                inner = self._ends(node.node)
                if node.max_times is None or node.max_times > 1:
                    self._join(inner.last, inner.first)
                return inner._replace(empty=inner.empty or node.min_times == 0)
            case SequenceNode():
                return self._sequence(self._ends(each) for each in node.nodes)
        parts = [self._ends(each) for each in node.children()]
        return _Ends(
            any(part.empty for part in parts),
            frozenset[int]().union(*(part.first for part in parts)),
            frozenset[int]().union(*(part.last for part in parts)),
        )

    def _place(self, chars: Ranges) -> _Ends:
        place = len(self.chars)
        if place == MAX_PIECES:
            raise TooLargeError
        self.chars.append(chars)
        self.follow.append(set())
        return _Ends(False, frozenset({place}), frozenset({place}))

    def _sequence(self, parts: Iterable[_Ends]) -> _Ends:
        whole = _Ends(True, frozenset(), frozenset())
        for part in parts:
            self._join(whole.last, part.first)
            whole = _Ends(
                whole.empty and part.empty,
                whole.first | part.first if whole.empty else whole.first,
                whole.last | part.last if part.empty else part.last,
            )
        return whole

    def _join(self, last: Iterable[int], first: frozenset[int]) -> None:
        for place in last:
            self.follow[place] |= first


class _Grammar:
    """The pieces of a grammar and those that may follow each, by its rules' FIRST and FOLLOW."""

    def __init__(self, rules: dict[str, RuleNode]) -> None:
        self._rules = [rule for rule in rules.values() if not rule.rule_is_terminal]
        self._numbers: dict[int, int] = {}  # by the identity of a node
        self._work = 0
        self.pieces: list[_Piece] = []
        self._empty = {rule.name: False for rule in self._rules}
        self._first = {rule.name: frozenset[int]() for rule in self._rules}
        self._follow = {rule.name: frozenset[int]() for rule in self._rules}
        self.next: dict[int, frozenset[int]] = {}
        while self._grown():
            pass
        self.start = self._first["start"]

    def _spend(self, looks: int) -> None:
        self._work += looks
        if self._work > MAX_WORK:
            raise TooLargeError

    def _grown(self) -> bool:
        before = (dict(self._empty), dict(self._first), dict(self._follow), dict(self.next))
        for rule in self._rules:
            body = rule.alternatives
            self._empty[rule.name] |= self._is_empty(body)
            self._first[rule.name] |= self._begin(body)
            self._walk(body, self._follow[rule.name])
        return before != (self._empty, self._first, self._follow, self.next)

    def _piece(self, node: ASTNode) -> int | None:
        """The number of a node that is one piece."""
        self._spend(1)
        if isinstance(node, RuleRefNode):
            if not _target(node).rule_is_terminal:
                return None
        elif not isinstance(node, LiteralNode | RegexNode):
            return None
        if id(node) not in self._numbers:
            if len(self.pieces) == MAX_PIECES:
                raise TooLargeError
            self._numbers[id(node)] = len(self.pieces)
            self.pieces.append(_Piece(node))
        return self._numbers[id(node)]

    def _is_empty(self, node: ASTNode) -> bool:
        number = self._piece(node)
        if number is not None:
            return self.pieces[number].ends.empty
        match node:
            case RuleRefNode():
                return self._empty[_target(node).name]
            case RepetitionNode():
                return node.min_times == 0 or self._is_empty(node.node)
            case AlternativeNode():
                return any(map(self._is_empty, node.alternatives))
        return all(map(self._is_empty, node.children()))

    def _begin(self, node: ASTNode) -> frozenset[int]:
        number = self._piece(node)
        if number is not None:
            return frozenset({number})
        if isinstance(node, RuleRefNode):
            return self._first[_target(node).name]
        found = frozenset[int]()
        for each in node.children():
            found |= self._begin(each)
            if isinstance(node, SequenceNode) and not self._is_empty(each):
                break
        return found

    def _walk(self, node: ASTNode, follow: frozenset[int]) -> None:
        number = self._piece(node)
        if number is not None:
            self.next[number] = self.next.get(number, frozenset()) | follow
            return
        match node:
            case RuleRefNode():
                self._follow[_target(node).name] |= follow
            case RepetitionNode():
                again = node.max_times is None or node.max_times > 1
                self._walk(node.node, follow | self._begin(node) if again else follow)
            case SequenceNode():
                for each in reversed(node.nodes):
                    self._walk(each, follow)
                    begin = self._begin(each)
                    follow = begin | follow if self._is_empty(each) else begin
            case _:
                for each in node.children():
                    self._walk(each, follow)

    def differs(self) -> bool:
        """Whether a piece may end where it, or another one that may stand there, could go on with a
        character that may also come after its end.
        """
        seen: set[frozenset[Spot]] = set()
        for begin in {self.start, *self.next.values()}:
            todo = [frozenset(self._begins(begin))]
            while todo:
                spots = todo.pop()
                for read in self._read(spots):
                    going_on = frozenset(
                        (number, place)
                        for number, at in read
                        for place in self.pieces[number].follow[at]
                    )
                    if self._ends_within(read, going_on):
                        return True
                    if going_on and going_on not in seen:
                        seen.add(going_on)
                        todo.append(going_on)
        return False

    def _begins(self, numbers: Iterable[int]) -> Iterator[Spot]:
        return ((number, place) for number in numbers for place in self.pieces[number].ends.first)

    def _chars(self, spot: Spot) -> Ranges:
        return self.pieces[spot[0]].chars[spot[1]]

    def _read(self, spots: frozenset[Spot]) -> set[frozenset[Spot]]:
        """The spots that one character is at, for every character that tells them apart."""
        edges = {0}
        for spot in spots:
            for low, high in self._chars(spot):
                edges |= {low, high + 1}
        self._spend(len(edges) * len(spots))
        reads = (
            frozenset(spot for spot in spots if _has(self._chars(spot), edge)) for edge in edges
        )
        return {read for read in reads if read}

    def _ends_within(self, read: frozenset[Spot], going_on: frozenset[Spot]) -> bool:
        for number, place in read if going_on else ():
            if place in self.pieces[number].ends.last:
                later = [*self._begins(self.next[number])]
                self._spend(len(going_on) * len(later))
                if any(_meet(self._chars(a), self._chars(b)) for a in going_on for b in later):
                    return True
        return False


def by_characters(grammar: str) -> str | None:
    """The grammar in Lark's syntax with pieces of one character, where pieces of more mean another
    thing; None where they do not, and for a grammar that is too large to tell. ``grammar``: as the
    converter reads it. Raises whatever its parser raises.
    """
    if grammar.count("::=") > MAX_PIECES:
        return None
    rules = GrammarParser().parse(grammar)
    resolve(rules)
    try:
        if not _Grammar(rules).differs():
            return None
    except (TooLargeError, RecursionError):  # the latter of rules that go deep
        return None
    lines = ["%llguidance {}"]
    for rule in sorted(rules.values(), key=lambda rule: rule.order):
        rule.name = rule.name.lower()  # no piece, which has a name in capitals
    for rule in sorted(rules.values(), key=lambda rule: rule.order):
        rule.alternatives = _split(rule.alternatives)
        lines.append(f"{rule.name}: {rule.alternatives.top_str()}")
    return "\n".join(lines)


def _split(node: ASTNode) -> ASTNode:
    """The node with a literal for each character of one."""
    match node:
        case LiteralNode() if len(chars := [*_escapes(node.value)]) > 1:
            return AlternativeNode([SequenceNode([LiteralNode(char) for char in chars])])
        case RepetitionNode():
            node.node = _split(node.node)
        case SequenceNode():
            node.nodes = [_split(each) for each in node.nodes]
        case AlternativeNode():
            node.alternatives = [_split(each) for each in node.alternatives]
    return node


def _target(node: RuleRefNode) -> RuleNode:
    return cast("RuleNode", node.target)  # resolved


def _escapes(text: str) -> Iterator[str]:
    """The characters of a literal or a set as the converter writes them, escapes whole."""
    place = 0
    while place < len(text):
        size = 1 if text[place] != "\\" else 4 if text[place + 1] == "x" else 2
        yield text[place : place + size]
        place += size


def _text(value: str) -> str:
    return "".join(map(_character, _escapes(value)))


def _character(written: str) -> str:
    if len(written) == 1:
        return written
    return (
        chr(int(f"0{written[1:]}", 0)) if written[1] == "x" else _NAMED.get(written[1], written[1])
    )


def _ranges(rx: str) -> Ranges:
    """The characters of a set, such as ``[^a-z]``."""
    if rx == ".":
        return _ANY
    inside = rx[1:-1]
    negated = inside.startswith("^")
    written = [*_escapes(inside[negated:])]
    found: list[tuple[int, int]] = []
    place = 0
    while place < len(written):
        low = high = ord(_character(written[place]))
        if written[place + 1 : place + 2] == ["-"] and place + 2 < len(written):
            high = ord(_character(written[place + 2]))
            place += 2
        found.append((low, high))
        place += 1
    return _others(found) if negated else tuple(found)


def _others(ranges: list[tuple[int, int]]) -> Ranges:
    rest, low = [], 0
    for begin, end in sorted(ranges):
        if begin > low:
            rest.append((low, begin - 1))
        low = max(low, end + 1)
    return (*rest, (low, _LAST)) if low <= _LAST else tuple(rest)


def _has(ranges: Ranges, char: int) -> bool:
    return any(low <= char <= high for low, high in ranges)


def _meet(a: Ranges, b: Ranges) -> bool:
    return any(low <= end and begin <= high for low, high in a for begin, end in b)
