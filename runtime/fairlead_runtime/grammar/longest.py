r"""Grammars of llama.cpp that mean another thing where a lexer takes the longest piece of text.

llguidance reads an output in pieces, each a literal, a set of characters or a rule that refers to
no recursive one, and gives none of their characters back: where ``ws ::= [ \t\n]*`` stands before a
line end the blanks take it. llama.cpp reads characters. Owns the question whether the two differ,
which is answered with yes where that is not sure, and the reading of what the converter wrote.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import NamedTuple, cast

from llguidance.gbnf_to_lark import (
    AlternativeNode,
    ASTNode,
    LiteralNode,
    RegexNode,
    RepetitionNode,
    RuleNode,
    RuleRefNode,
    SequenceNode,
)

MAX_WORK = 1_000_000  # looks at ranges and members of sets: less than half a second
_NODE = 10  # looks that one at a node or a place of a character takes as long as
_LAST = 0x10FFFF
_NAMED = {"n": "\n", "r": "\r", "t": "\t"}
GIVES_BACK = "a run gives characters back"
TOO_LARGE = "it is too large to tell whether a run gives characters back"
TOO_DEEP = "its rules go too deep to tell whether a run gives characters back"

Ranges = list[tuple[int, int]]  # of characters, ends included
State = frozenset[int]  # places of characters, one of which comes next


class TooLargeError(ValueError):
    """The answer takes more work than is done for it."""


def difference(rules: Iterable[RuleNode]) -> str:
    """Why the rules, as the converter resolves them, may mean another thing where pieces are the
    longest; empty where they do not. After MAX_WORK, or too deep, it is that nobody knows.
    """
    try:
        return GIVES_BACK if _Grammar(list(rules)).differs() else ""
    except TooLargeError:
        return TOO_LARGE
    except RecursionError:
        return TOO_DEEP


class _Ends(NamedTuple):
    """The places at which a text of a node begins and ends."""

    empty: bool
    first: frozenset[int]
    last: frozenset[int]


class _Pieces:
    """The texts of all pieces, by Glushkov's automaton: places of characters, and what follows
    each. Counted repetitions are endless ones, which allows more.
    """

    def __init__(self, spend: Callable[[int], None]) -> None:
        self._spend = spend
        self._known: dict[int | str, int] = {}  # sets of characters, by their writing
        self._sets: list[Ranges] = []
        self._set_of: list[int] = []  # by place
        self.follow: list[set[int]] = []  # by place
        self.piece_of: list[int] = []  # by place
        self.ends: list[_Ends] = []  # by piece

    def add(self, node: ASTNode) -> int:
        number = len(self.ends)
        self.ends.append(self._ends(node))
        self.piece_of += [number] * (len(self.follow) - len(self.piece_of))
        return number

    def _ends(self, node: ASTNode) -> _Ends:
        self._spend(_NODE)
        match node:
            case LiteralNode():
                return self._sequence(self._place(ord(char)) for char in _text(node.value))
            case RegexNode():
                return self._place(node.rx)
            case RuleRefNode():
                return self._ends(_target(node).alternatives)
            case RepetitionNode():
                inner = self._ends(node.node)
                if _again(node):
                    self._join(inner.last, inner.first)
                return inner._replace(empty=inner.empty or node.min_times == 0)
            case SequenceNode():
                return self._sequence(self._ends(child) for child in node.nodes)
        empty, first, last = False, set[int](), set[int]()
        for part in (self._ends(child) for child in node.children()):
            self._spend(len(part.first) + len(part.last))
            empty = empty or part.empty
            first |= part.first
            last |= part.last
        return _Ends(empty, frozenset(first), frozenset(last))

    def _place(self, written: int | str) -> _Ends:
        """A place of the character or of one of the set."""
        self._spend(_NODE)
        if written not in self._known:
            ranges = [(written, written)] if isinstance(written, int) else self._ranges(written)
            self._known[written] = len(self._sets)
            self._sets.append(ranges)
        place = frozenset({len(self.follow)})
        self._set_of.append(self._known[written])
        self.follow.append(set())
        return _Ends(False, place, place)

    def _ranges(self, written: str) -> Ranges:
        self._spend(len(written))
        members = members_of(written)
        ranges = _merged(members.ranges)
        return _complement(ranges) if members.negated else ranges

    def _sequence(self, parts: Iterable[_Ends]) -> _Ends:
        joint = _Ends(True, frozenset(), frozenset())
        for part in parts:
            self._join(joint.last, part.first)
            first = joint.first | part.first if joint.empty else joint.first
            last = joint.last | part.last if part.empty else part.last
            self._spend((len(first) if joint.empty else 0) + (len(last) if part.empty else 0))
            joint = _Ends(joint.empty and part.empty, first, last)
        return joint

    def _join(self, last: frozenset[int], first: frozenset[int]) -> None:
        self._spend(len(last) * len(first))
        for place in last:
            self.follow[place] |= first

    def classes(self) -> list[frozenset[int]]:
        """By place, the classes of characters of its set: no set tells two of a class apart."""
        edges = defaultdict[int, list[tuple[bool, int]]](list)
        for number, ranges in enumerate(self._sets):
            self._spend(len(ranges))
            for low, high in ranges:
                edges[low].append((True, number))
                edges[high + 1].append((False, number))
        known = set[frozenset[int]]()
        inside, classes = set[int](), [set[int]() for _ in self._sets]
        for edge in sorted(edges):
            for begins, number in edges[edge]:
                (inside.add if begins else inside.remove)(number)
            self._spend(1 + len(inside))
            if (now := frozenset(inside)) not in known:
                for number in now:
                    classes[number].add(len(known))
                known.add(now)
        frozen = [frozenset(numbers) for numbers in classes]
        return [frozen[number] for number in self._set_of]


class _Grammar:
    """The pieces of a grammar and those that may follow each, by its rules' FIRST and FOLLOW."""

    def __init__(self, rules: list[RuleNode]) -> None:
        self._rules = [rule for rule in rules if not rule.rule_is_terminal]
        self._numbers: dict[int, int] = {}  # by the identity of a node
        self._work = 0
        self._pieces = _Pieces(self._spend)
        self._empty = {rule.name: False for rule in self._rules}
        self._first = {rule.name: set[int]() for rule in self._rules}
        self._follow = {rule.name: set[int]() for rule in self._rules}
        self._next = defaultdict[int, set[int]](set)
        size = -1
        while size < (size := self._grow()):
            pass
        self._classes = self._pieces.classes()

    def _spend(self, looks: int) -> None:
        self._work += looks
        if self._work > MAX_WORK:
            raise TooLargeError

    def _grow(self) -> int:
        """Let the sets grow by one round. Returns their size."""
        for rule in reversed(self._rules):  # most rules refer to later ones
            self._empty[rule.name] |= self._is_empty(rule.alternatives)
            self._unite(self._first[rule.name], self._begin(rule.alternatives))
        for rule in self._rules:
            self._walk(rule.alternatives, self._follow[rule.name])
        sets = [*self._first.values(), *self._follow.values(), *self._next.values()]
        self._spend(len(sets))
        return sum(map(len, sets)) + sum(self._empty.values())

    def _unite(self, into: set[int], more: set[int]) -> set[int]:
        self._spend(1 + len(more))
        into |= more
        return into

    def _piece(self, node: ASTNode) -> int | None:
        """The number of a node that is one piece."""
        self._spend(_NODE)
        if isinstance(node, RuleRefNode):
            if not _target(node).rule_is_terminal:
                return None
        elif not isinstance(node, LiteralNode | RegexNode):
            return None
        if id(node) not in self._numbers:
            self._numbers[id(node)] = self._pieces.add(node)
        return self._numbers[id(node)]

    def _is_empty(self, node: ASTNode) -> bool:
        number = self._piece(node)
        if number is not None:
            return self._pieces.ends[number].empty
        match node:
            case RuleRefNode():
                return self._empty[_target(node).name]
            case RepetitionNode():
                return node.min_times == 0 or self._is_empty(node.node)
            case AlternativeNode():
                return any(map(self._is_empty, node.alternatives))
        return all(map(self._is_empty, node.children()))

    def _begin(self, node: ASTNode) -> set[int]:
        """Not to be changed."""
        number = self._piece(node)
        if number is not None:
            return {number}
        if isinstance(node, RuleRefNode):
            return self._first[_target(node).name]
        begin = set[int]()
        for child in node.children():
            self._unite(begin, self._begin(child))
            if isinstance(node, SequenceNode) and not self._is_empty(child):
                break
        return begin

    def _walk(self, node: ASTNode, follow: set[int]) -> None:
        number = self._piece(node)
        if number is not None:
            self._unite(self._next[number], follow)
            return
        match node:
            case RuleRefNode():
                self._unite(self._follow[_target(node).name], follow)
            case RepetitionNode() if _again(node):
                self._walk(node.node, self._both(follow, self._begin(node)))
            case SequenceNode():
                for child in reversed(node.nodes):
                    self._walk(child, follow)
                    begin = self._begin(child)
                    follow = self._both(follow, begin) if self._is_empty(child) else begin
            case _:
                for child in node.children():
                    self._walk(child, follow)

    def _both(self, follow: set[int], begin: set[int]) -> set[int]:
        return self._unite(self._unite(set(), follow), begin)

    def differs(self) -> bool:
        """Whether pieces may end where they, or others that may stand there, could go on with a
        character that may also come after their end. A state of the lexer is a set of places,
        since several pieces may have ended in one text.
        """
        ends = self._pieces.ends
        last = frozenset[int]().union(*(piece.last for piece in ends))
        begin = self._begins(self._first["start"])
        states, todo = {begin}, [begin]
        while todo:
            for read in self._reads(todo.pop()):
                going_on = self._union(self._pieces.follow[place] for place in read)
                ended = {self._pieces.piece_of[place] for place in read if place in last}
                later = self._begins(self._union(self._next[number] for number in ended))
                if going_on and later and not self._chars(going_on).isdisjoint(self._chars(later)):
                    return True
                for state in (going_on, later):
                    if state not in states:
                        states.add(state)
                        todo.append(state)
        return False

    def _union(self, parts: Iterable[AbstractSet[int]]) -> State:
        union = set[int]()
        for part in parts:
            self._spend(1 + len(part))
            union |= part
        return frozenset(union)

    def _begins(self, numbers: Iterable[int]) -> State:
        return self._union(self._pieces.ends[number].first for number in numbers)

    def _chars(self, state: State) -> frozenset[int]:
        return self._union(self._classes[place] for place in state)

    def _reads(self, state: State) -> set[State]:
        """The places that one character is at, for every character that tells them apart."""
        places = defaultdict[int, list[int]](list)
        for place in state:
            self._spend(1 + len(self._classes[place]))
            for number in self._classes[place]:
                places[number].append(place)
        return {frozenset(group) for group in places.values()}


class Members(NamedTuple):
    """The members of a set as it is written, such as ``[^a-z]``."""

    negated: bool
    ranges: Ranges


def members_of(written: str) -> Members:
    if written == ".":
        return Members(True, [])
    inside = written[1:-1]
    negated = inside.startswith("^")
    chars = [*escapes(inside[negated:])]
    ranges: Ranges = []
    place = 0
    while place < len(chars):
        low = high = ord(_character(chars[place]))
        if chars[place + 1 : place + 2] == ["-"] and place + 2 < len(chars):
            high = ord(_character(chars[place + 2]))
            place += 2
        ranges.append((low, high))
        place += 1
    return Members(negated, ranges)


def escapes(text: str) -> Iterator[str]:
    """The characters of a literal or a set as the converter writes them, escapes whole."""
    place = 0
    while place < len(text):
        size = 1 if text[place] != "\\" else 4 if text[place + 1] == "x" else 2
        yield text[place : place + size]
        place += size


def _again(node: RepetitionNode) -> bool:
    return node.max_times is None or node.max_times > 1


def _target(node: RuleRefNode) -> RuleNode:
    return cast("RuleNode", node.target)  # resolved


def _text(value: str) -> str:
    return "".join(map(_character, escapes(value)))


def _character(written: str) -> str:
    if len(written) == 1:
        return written
    return (
        chr(int(f"0{written[1:]}", 0)) if written[1] == "x" else _NAMED.get(written[1], written[1])
    )


def _merged(ranges: Ranges) -> Ranges:
    """The ranges in order, none beside another."""
    merged: Ranges = []
    for low, high in sorted(span for span in ranges if span[0] <= span[1]):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged


def _complement(merged: Ranges) -> Ranges:
    rest, low = [], 0
    for begin, end in merged:
        if begin > low:
            rest.append((low, begin - 1))
        low = end + 1
    return [*rest, (low, _LAST)] if low <= _LAST else rest
