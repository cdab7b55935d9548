"""The error tree: every error carries its decision, and the drawing of the tree is complete."""

import pickle
import re

import pytest

from raftq.client.common import errors
from raftq.client.common.errors import RaftqError


def tree(cls: type[RaftqError] = RaftqError) -> list[type[RaftqError]]:
    found = [cls]
    for child in cls.__subclasses__():
        found += [one for one in tree(child) if one not in found]
    return [one for one in found if one.__module__ == errors.__name__]


ALL = tree()


def test_codes_are_unique_and_lead_back_to_their_class() -> None:
    codes = [cls.code for cls in ALL]
    assert len(set(codes)) == len(codes) > 20
    assert all(RaftqError.registry[cls.code] is cls for cls in ALL)


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_every_error_carries_its_decision(cls: type[RaftqError]) -> None:
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", cls.code)
    assert "code" in cls.__dict__
    assert isinstance(cls.retriable, bool)
    assert cls.outcome in ("failed", "unknown")


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_every_error_survives_a_pickle(cls: type[RaftqError]) -> None:
    copy = pickle.loads(pickle.dumps(cls("what happened")))
    assert type(copy) is cls
    assert str(copy) == "what happened"


def drawn() -> list[tuple[int, str]]:
    """(depth, name) of each line of the tree in the docstring."""
    assert errors.__doc__ is not None
    lines = re.findall(r"^    ([│├└─ ]*)([A-Z]\w+)(?:  .*)?$", errors.__doc__, re.MULTILINE)
    return [(len(indent) // 4, name) for indent, name in lines]


def test_the_docstring_draws_exactly_the_classes_that_exist() -> None:
    assert sorted(name for _, name in drawn()) == sorted(cls.__name__ for cls in ALL)


def test_the_docstring_draws_each_class_under_its_parent() -> None:
    path: list[str] = []
    for depth, name in drawn():
        path[depth:] = [name]
        parent = getattr(errors, name).__bases__[0].__name__
        assert parent == (path[depth - 1] if depth else "Exception"), name


def test_a_repeated_or_missing_code_is_refused() -> None:
    with pytest.raises(TypeError, match="repeats the code 'too_large'"):
        type("Second", (RaftqError,), {"code": "too_large"})
    with pytest.raises(TypeError, match="repeats the code 'error'"):
        type("Third", (RaftqError,), {"code": "error"})
    with pytest.raises(TypeError, match="needs a code of its own"):
        type("Fourth", (errors.TooLarge,), {})


def test_an_invalid_argument_is_also_a_value_error() -> None:
    assert issubclass(errors.InvalidArgument, ValueError)
