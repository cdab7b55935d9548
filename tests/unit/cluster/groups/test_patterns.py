"""Patterns of topic names: as `re` has them, and never slow."""

import re
import time
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftq.client.common.errors import InvalidArgument
from raftq.cluster.groups.patterns import Pattern

ATOMS = ["a", "b", "-", r"\.", ".", "[ab]", "[^a]", r"\d", r"\w", r"\W", "[a-c0-9_]", "[.-]", "7"]
REPEATS = ["", "", "*", "+", "?", "{2}", "{1,3}", "{,2}", "{2,}", "*?"]


def patterns() -> st.SearchStrategy[str]:
    atoms = st.sampled_from(ATOMS)
    return st.recursive(
        st.builds(str.__add__, atoms, st.sampled_from(REPEATS)),
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=4).map("".join),
            st.lists(inner, min_size=1, max_size=3).map(lambda found: f"(?:{'|'.join(found)})"),
            st.builds("({}){}".format, inner, st.sampled_from(REPEATS)),
        ),
        max_leaves=8,
    )


@settings(max_examples=600, deadline=None)
@given(patterns(), st.lists(st.text("abc.-_79A", max_size=8), min_size=1, max_size=20))
def test_it_matches_what_the_library_matches(text: str, names: list[str]) -> None:
    pattern = Pattern(text)
    # Python reads {,2} as up to two only since 3.13 in all cases; written out it is the same.
    expected = re.compile(text.replace("{,", "{0,"))
    for name in names:
        assert pattern.matches(name) == (expected.fullmatch(name) is not None), (text, name)


@pytest.mark.parametrize(
    ("text", "yes", "no"),
    [
        ("orders", ("orders",), ("order", "orders2", "")),
        (r"^orders\..*$", ("orders.", "orders.eu"), ("ordersXeu", "orders")),
        ("orders|payments", ("orders", "payments"), ("orderspayments",)),
        ("(eu|us)-[0-9]{2}", ("eu-07", "us-99"), ("eu-7", "eu-777")),
        (".*", ("x", "", "a.b-c_D9"), ()),
        ("", ("",), ("x",)),
        ("a|", ("a", ""), ("b",)),
        ("[]a]", ("a",), ("b",)),
        ("a[!-#]?", ("a",), ("a!",)),
        ("x\u00e9", (), ("x", "xe")),
    ],
)
def test_patterns_that_people_write(text: str, yes: tuple[str, ...], no: tuple[str, ...]) -> None:
    pattern = Pattern(text)
    assert all(map(pattern.matches, yes))
    assert not any(map(pattern.matches, no))


@pytest.mark.parametrize(
    "text",
    ["(", ")", "a)", "(a", "[", "[a", "[z-a]", "*", "a**", "a{", "a{x}", "a{3,1}", "a{999}", "+a",
     "(?=a)", "(?P<x>a)", r"\1", r"\b", "\\", "a$b", "a^b", "(?i)a", "(" * 60 + "a" + ")" * 60,
     "(((a{99}){99}){99}){99}", "a{,}"],
)  # fmt: skip
def test_what_is_not_offered_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        Pattern(text)


@pytest.mark.parametrize(
    "text", ["(a+)+b", "(a*)*b", "(a|a)*b", ".*.*.*.*.*.*.*.*b", "(a?){60}a{60}", "(.*a){20}b"]
)
def test_no_pattern_takes_long(text: str) -> None:
    began = time.process_time()
    assert not Pattern(text).matches("a" * 248 + "c")
    assert time.process_time() - began < 0.5


@settings(max_examples=300, deadline=None)
@given(st.text("ab()[]{}*+?|\\^$.,-:13dw=P<>!", max_size=20))
def test_any_text_is_a_pattern_or_refused(text: str) -> None:
    with suppress(InvalidArgument):
        Pattern(text).matches("abab")
