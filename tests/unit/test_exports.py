"""What `raftq` and `raftq.aio` export: every type that a public signature names, and no others."""

import inspect
import subprocess
import sys
import typing
from collections.abc import Iterator
from types import ModuleType

import pytest

import raftq
from raftq import aio

ENTRANCES = {
    raftq: ("Admin", "AsyncQueue", "Consumer", "Producer", "Queue", "QueueClient", "Worker"),
    aio: ("Admin", "Consumer", "Producer", "QueueClient", "Worker"),
}
OTHERS = {"LetterFilter", "RaftqError", "Reject", "errors"}  # made or caught by applications


def raftq_types(hint: object) -> Iterator[type]:
    """The project's own classes in a type hint, but no lists of keywords."""
    if isinstance(hint, type) and hint.__module__.startswith("raftq."):
        if typing.is_typeddict(hint):
            return
        yield hint
    for part in (typing.get_origin(hint), *typing.get_args(hint)):
        if part is not None and part is not hint:
            for one in part if isinstance(part, list) else [part]:
                yield from raftq_types(one)


def named_by_methods(kind: type) -> Iterator[type]:
    for name, member in inspect.getmembers(kind):
        function = member.fget if isinstance(member, property) else member
        if not name.startswith("_") and inspect.isroutine(function):
            for hint in typing.get_type_hints(function).values():
                yield from raftq_types(hint)


def named_by_fields(kind: type) -> Iterator[type]:
    for name, hint in typing.get_type_hints(kind).items():
        if not name.startswith("_") and typing.get_origin(hint) is not typing.ClassVar:
            yield from raftq_types(hint)


def needed(module: ModuleType) -> set[str]:
    """The names of all types that an application can meet, from its clients on."""
    open_ = [one for name in ENTRANCES[module] for one in named_by_methods(getattr(module, name))]
    seen: dict[str, None] = {}
    while open_:
        kind = open_.pop()
        if kind.__name__ not in seen and not issubclass(kind, BaseException):
            seen[kind.__name__] = None
            open_ += [*named_by_fields(kind), *named_by_methods(kind)]
    return set(seen)


@pytest.mark.parametrize("module", ENTRANCES, ids=lambda module: module.__name__)
def test_every_type_of_a_public_signature_is_exported(module: ModuleType) -> None:
    expected = needed(module) | {*ENTRANCES[module]} | OTHERS
    assert set(module.__all__) == expected
    assert sorted(module.__all__) == list(module.__all__)
    for name in module.__all__:
        assert getattr(module, name).__name__.split(".")[-1] == name


def test_both_modules_export_the_same_types() -> None:
    for name in set(raftq.__all__) & set(aio.__all__) - {*ENTRANCES[aio]}:
        assert getattr(raftq, name) is getattr(aio, name)


def test_importing_raftq_loads_nothing_of_it() -> None:
    script = "import sys, raftq; print(sorted(x for x in sys.modules if x.startswith('raftq.')))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
