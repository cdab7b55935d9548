"""The voters that a Raft directory belongs to, in `voters.json` beside its journal. (Shell.)

What a voter has promised, its votes and what it holds, counts towards majorities of the voters it
was promised to. With other voters it would count other majorities, and two majorities of different
sets need not have a node in common: there could be two leaders. So the set is a part of
the directory from the first promise on. Only ids make the set; a voter may move to another address.

Invariants: a journal in which something is written has its set beside it; that set never changes.
While the journal is blank nothing was promised to anyone, so the settings may still be corrected.
A voter that lost its disk brings its set from its settings; the other voters compare it with theirs
before they say or believe anything (connection.py).
"""

import json
from collections.abc import Iterable
from posixpath import join

from raftq.client.common.disk import Disk
from raftq.client.common.errors import ConfigError
from raftq.cluster.raft.journal import RaftJournal

FORMAT = 1
NOT_YET = "voters cannot be changed by editing the settings yet, only their addresses can"
_NAME = "voters.json"


def in_order(voters: Iterable[str]) -> tuple[str, ...]:
    """The ids of a set in the one order in which sets are compared and shown; 9 before 10."""
    return tuple(sorted(voters, key=lambda one: (len(one), one)))


def shown(voters: Iterable[object]) -> str:
    return ", ".join(in_order(map(str, voters)))


def keep_to_voters(disk: Disk, directory: str, voters: Iterable[str], journal: RaftJournal) -> None:
    """Return when the directory belongs to these voters; ConfigError when it is another set's."""
    path = join(directory, _NAME)
    wanted = in_order(voters)
    if journal.blank:
        body = {"format": FORMAT, "voters": wanted}
        disk.write_file_atomic(path, json.dumps(body).encode())
        return
    if not disk.exists(path):
        raise ConfigError(f"{directory} has a journal, but {path} is missing: whose, nobody knows")
    known = _read(disk, path)
    if known != wanted:
        raise ConfigError(
            f"{directory} belongs to the voters {shown(known)}, but the settings name "
            f"{shown(wanted)}: {NOT_YET}"
        )


def refuse_former_voter(disk: Disk, directory: str, voters: Iterable[int]) -> None:
    """For a node that is no voter by its settings: ConfigError when its directory is a voter's."""
    path = join(directory, _NAME)
    if disk.exists(path):
        told = f"the settings name {shown(voters)}" if voters else "the settings name none"
        raise ConfigError(
            f"{directory} is a voter's, of the voters {shown(_read(disk, path))}, but {told} and "
            f"not this node: {NOT_YET}"
        )


def _read(disk: Disk, path: str) -> tuple[str, ...]:
    file = disk.open(path)
    try:
        known = json.loads(file.read(0, file.size))
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    finally:
        file.close()
    names = known.get("voters") if isinstance(known, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{path} cannot be read: it names no voters")
    if known.get("format") != FORMAT:
        raise ConfigError(f"{path} has format {known.get('format')!r}; this is {FORMAT}")
    return in_order(names)
