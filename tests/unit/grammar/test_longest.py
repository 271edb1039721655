"""llama.cpp's grammars read characters: a run gives back what the rest needs."""

import itertools
import re

import pytest
from llguidance import LLMatcher, LLTokenizer

from fairlead_runtime.grammar import longest
from fairlead_runtime.grammar.gbnf import lark_of

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


def accepts(lark: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(lark), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
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
    assert longest.by_characters(grammar) is None


def test_a_grammar_that_is_too_large_to_tell_keeps_its_form() -> None:
    letters = " ".join(f'"a" [b{"c" * place}]*' for place in range(longest.MAX_PIECES))
    assert longest.by_characters(f"root ::= {letters}") is None
    chain = "\n".join(f'r{place} ::= [ab]* r{place + 1} | "a"' for place in range(1000))
    assert longest.by_characters(f'root ::= r0\n{chain}\nr1000 ::= "b"') is None
