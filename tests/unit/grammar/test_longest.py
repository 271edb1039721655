"""llama.cpp's grammars read characters: a run gives back what the rest needs."""

import functools
import itertools
import random
import re
import time
from collections.abc import Iterator

import pytest
from llguidance import LLMatcher, LLTokenizer

from fairlead_runtime.grammar.compile import PANIC, GrammarError, compile_matcher, enforced
from fairlead_runtime.grammar.gbnf import LIBRARY_FAILS, lark_of, why_by_characters
from fairlead_runtime.grammar.longest import TOO_DEEP, TOO_LARGE
from fairlead_runtime.request.structured import StructuredOutputs
from support.full import LONG_FORM

BYTES = LLTokenizer("byte")
ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""


@functools.lru_cache(1)
def at_start(lark: str) -> LLMatcher:
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(lark), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(lark: str, text: str) -> bool:
    matcher = at_start(lark).deep_copy()
    tokens = [*text.encode()]
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("1=2\n", True),
        ("a1 +(2*b) = 3 \n\nx=1\n", True),
        ("1=2 \t\n \n", True),
        ("1=2", False),
        ("1=2 \t", False),
        ("1==2\n", False),
        ("(1=2\n", False),
    ],
)
def test_the_arithmetic_of_llama_cpp_ends_with_one_line_end(text: str, good: bool) -> None:
    assert accepts(lark_of(ARITHMETIC), text) == good


@pytest.mark.parametrize(
    ("grammar", "expression", "letters"),
    [
        ('root ::= "a" ws "c"\nws ::= [bc]*', "a[bc]*c", "abc"),
        ('root ::= "a" "bc" | "ab" "d"', "abc|abd", "abcd"),
        ('root ::= word "b"\nword ::= [ab]+', "[ab]+b", "ab"),
        ('root ::= ("a" | "ab") ("c" | "bc")', "(a|ab)(c|bc)", "abc"),
        ('root ::= x x\nx ::= "a" | "ab" | "ba"', "(a|ab|ba){2}", "ab"),
        ('root ::= run "." run\nrun ::= [ab]{1,2} "a"?', r"[ab]{1,2}a?\.[ab]{1,2}a?", "ab."),
        ('root ::= [^a]* "b"', "[^a]*b", "abc"),
        ('root ::= rest "b"\nrest ::= [^a]*', "[^a]*b", "abc"),
        ('root ::= any "c"\nany ::= .*', ".*c", "abc"),
        ('root ::= (pair "a")+\npair ::= "b"? "a"*', "(b?a*a)+", "ab"),
        ('root ::= maybe maybe "a"\nmaybe ::= "a"?', "a?a?a", "ab"),
        ('root ::= key | name "b"\nkey ::= "ab" "c"?\nname ::= [a-c]', "abc?|[abc]b", "abc"),
        ('root ::= [b]{0,2} [ab] ("aab" [ab])? | [ab]+', "[ab]+", "ab"),
        ('root ::= ("ab"? | "ab" "a" "b"{0,2}){1,2}', "((ab)?|abab{0,2}){1,2}", "ab"),
        (
            'root ::= (("b" "ba"){0,2} [ab] | "b") root | ("b" "ba"){0,2} [ab] | "b"',
            "((bba){0,2}[ab]|b)+",
            "ab",
        ),
        ('root ::= ("a"+)? "b"', "a*b", "ab"),
        ('root ::= word "b"\nword ::= ("a"?){1,2}', "a{0,2}b", "ab"),
        ('root ::= ((x)*)+ "b"\nx ::= "a" | "ab"', "(a|ab)*b", "ab"),
        ('root ::= (("a"{2})+)? "b"{0,0} x{0} "a"\nx ::= "b"', "(aa)*a", "ab"),
        ('root ::= "b" .', "(?s)b.", "ab\n"),
        ("root ::= [a&&b]+ [a~~b] [+--a]", "[ab&]+[ab~][+,a-]", "b&~-"),
        (r'root ::= esc "\"" ' + '\nesc ::= ["\\\\\\x61]+', r'["\\a]+"', '"\\a'),
    ],
)
def test_a_run_gives_back_what_the_rest_needs(grammar: str, expression: str, letters: str) -> None:
    lark = lark_of(grammar)
    for size in range(6):
        for chosen in itertools.product(letters, repeat=size):
            text = "".join(chosen)
            assert accepts(lark, text) == bool(re.fullmatch(expression, text)), text


def test_a_grammar_that_rules_call_each_other_in_gives_characters_back_too() -> None:
    lark = lark_of('root ::= list "b"\nlist ::= item | item list\nitem ::= "a" [ab]* "."')
    for text, good in {"a.b": True, "ab.a.b": True, "a..b": False, "aa.a": False}.items():
        assert accepts(lark, text) == good, text


PIECES = ('"a"', '"b"', '"ab"', '"ba"', '"aab"', "[ab]", "[b]", "")
TIMES = ("", "", "", "?", "*", "+", "{0,2}", "{1,2}", "{2}")
RANDOM_GRAMMARS = 400 if LONG_FORM else 150
TEXTS = ["".join(text) for size in range(7) for text in itertools.product("ab", repeat=size)]


def random_body(choose: random.Random, depth: int) -> tuple[str, str]:
    """A body of GBNF and the expression that means the same; ``r0`` stands for ``\0``."""
    if not depth or choose.random() < 0.2:
        piece = choose.choice(PIECES)
        return (piece or "r0", f"(?:{piece.strip(chr(34))})" if piece else "\0")
    parts = [random_body(choose, depth - 1) for _ in range(choose.randint(1, 3))]
    between = choose.choice((" ", " | "))
    times = choose.choice(TIMES)
    return (
        f"({between.join(part for part, _ in parts)}){times}",
        f"(?:{between.strip().join(part for _, part in parts)}){times}",
    )


def random_grammars() -> Iterator[tuple[str, str]]:
    choose = random.Random(20)
    for _ in range(RANDOM_GRAMMARS):
        (r0, inner), (one, again) = random_body(choose, 1), random_body(choose, 2)
        (two, last) = random_body(choose, 1)
        r0, inner = r0.replace("r0", '"b"'), inner.replace("\0", "(?:b)")
        recursive = choose.random() < 0.5
        body = f"{one} root | {two}" if recursive else f"{one} {two}"
        expression = f"(?:{again})*(?:{last})" if recursive else again + last
        yield f"root ::= {body}\nr0 ::= {r0}", expression.replace("\0", inner)


def test_random_grammars_mean_what_an_expression_means() -> None:
    forms, until = set(), time.monotonic() + 20
    for grammar, expression in random_grammars():
        # Nothing of an engine's tokenizer is asked for.
        lark = enforced(BYTES, StructuredOutputs(grammar=grammar))
        forms.add(why_by_characters(lark) == "")
        for text in TEXTS:
            assert accepts(lark, text) == bool(re.fullmatch(expression, text)), (grammar, text)
        if len(forms) == 2 and time.monotonic() > until:
            break
    assert forms == {True, False}  # with pieces, and by characters


@pytest.mark.parametrize(
    "grammar",
    [
        JSON,
        'root ::= "yes" | "no"',
        'root ::= item+\nitem ::= "- " [^\\n]+ "\\n"',
        "root ::= char+ ([ \\n] char+)*\nchar ::= [a-z] | digit\ndigit ::= [0-9]",
    ],
)
def test_a_grammar_without_the_difference_keeps_its_faster_form(grammar: str) -> None:
    assert not why_by_characters(lark_of(grammar))


def han(start: int) -> str:
    """3,000 characters that are no neighbours."""
    return "".join(chr(start + 2 * place) for place in range(3000))


DOUBLED = "\n".join(f"a{place} ::= a{place - 1} a{place - 1}" for place in range(1, 20))
CHAIN = "\n".join(f'r{place} ::= [ab]* r{place + 1} | "a"' for place in range(400))
LISTS = "\n".join(f'r{place} ::= "a" r{place} | r{place + 1}' for place in range(1000))
LARGE = {
    "rules of nothing": f'root ::= x "a" root | "b"\nx ::= a19\na0 ::= ""\n{DOUBLED}',
    "rules of a character": f'root ::= x "a" root | "b"\nx ::= a19\na0 ::= "c"\n{DOUBLED}',
    "sets in a row": "root ::= x\nx ::= " + " ".join(["[ab]*"] * 2000),
    "sets by pieces": 'root ::= "c" root | ' + " ".join(["[ab]*"] * 2000),
    "rules in a chain": f'root ::= r0\n{CHAIN}\nr400 ::= "b"',
    "recursive rules": f'root ::= r0\n{LISTS}\nr1000 ::= "b"',
    "many sets": "root ::= " + " ".join(f"[{han(0x4E00 + place)}]*" for place in range(19)),
    "many begins": "root ::= " + " | ".join(f'"{"a" * place}b"' for place in range(300)),
}


@pytest.mark.parametrize("grammar", LARGE.values(), ids=LARGE)
def test_the_question_is_given_up_after_bounded_work(
    grammar: str,
) -> None:
    begin = time.process_time()
    lark_of(grammar)
    assert time.process_time() - begin < 2


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("rules of nothing", TOO_LARGE),
        ("sets in a row", TOO_LARGE),
        ("rules in a chain", TOO_DEEP),
        ("many sets", ""),
        ("many begins", ""),
    ],
)
def test_a_grammar_that_is_too_large_to_tell_is_read_by_characters(name: str, why: str) -> None:
    assert why_by_characters(lark_of(LARGE[name])) == why


def test_sets_of_many_characters_are_told_apart() -> None:
    first, second = han(0x4E00), han(0x4E01)
    grammar = f'root ::= ([{first}])* [{second}]* "x" root | "b"'
    lark = enforced(BYTES, StructuredOutputs(grammar=grammar))
    assert accepts(lark, f"{first[:2]}{second[:2]}xb")
    assert not accepts(lark, f"{second[0]}{first[0]}xb")
    runs = f'root ::= x y "x" root | "b"\nx ::= [{first}]*\ny ::= [{second}]*'
    assert not why_by_characters(lark_of(runs))  # no character is of both


FAILING = '(("ba" | "aab") | ("a" "ab" | "ba"))'


def test_a_grammar_that_llguidance_fails_at_is_read_by_characters() -> None:
    grammar = f"root ::= r0 root | r0\nr0 ::= {FAILING}"
    lark = enforced(BYTES, StructuredOutputs(grammar=grammar))
    assert why_by_characters(lark) == LIBRARY_FAILS
    for text, good in {"ba": True, "aabba": True, "aab": True, "aa": False}.items():
        assert accepts(lark, text) == good, text


def test_a_failure_of_llguidance_is_told_in_our_words() -> None:
    with pytest.raises(GrammarError) as caught:
        compile_matcher(BYTES, StructuredOutputs(grammar=f"start: R start | R\nR: {FAILING}"))
    assert str(caught.value) == PANIC
