"""What a node remembers of itself in its data directory, and what it may have lost. (Shell.)

    {data_dir}/node.json          node_id, cluster_id, boot_id, incarnation, clean
    {data_dir}/logs/incarnation   the same incarnation

A killed process loses nothing: what it wrote is in the page cache of the kernel. A machine that
went down may have lost what was not synced. `boot_id` tells the two apart: it changes when the
kernel starts. A node that may have lost its tail says so when it registers, and counts as in sync
only when it has caught up again. A directory without the file has lost everything.

A disk that was restored from an older copy looks whole. But its incarnation is older: when only the
logs are older, older than that in node.json; when everything is, older than the metadata knows.
`replica_files.truncated_logs` finds single logs that lost durable bytes.

The files are written after the registration was decided, and not before: a second crash in between
must not make the node forget what it has to report. If the crash comes between the two files, the
logs count as older than they are.
"""

import json
from dataclasses import dataclass

from raftq.client.common.disk import Disk
from raftq.client.common.errors import ConfigError
from raftq.cluster.metadata.commands import Lost

FORMAT = 1
FILE_BYTES_MAX = 64 * 1024
MARK_NAME = "incarnation"
MARK = f"logs/{MARK_NAME}"
BOOT_ID_PATH = "/proc/sys/kernel/random/boot_id"


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of one node. `boot_id` is "" where the system has none, and then proves
    nothing."""

    node_id: int
    cluster_id: str
    boot_id: str
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class Loss:
    """What a directory lost, and its last incarnation, if it had one."""

    lost: Lost
    before: int | None = None
    synced: bool = False
    """Everything in the directory is on the disk: the last stop was clean."""


def what_was_lost(disk: Disk, data_dir: str, identity: Identity) -> Loss:
    """Return what the logs in the directory may have lost of the acknowledged records."""
    path = f"{data_dir}/node.json"
    if not disk.exists(path):
        return Loss("everything")
    try:
        known = json.loads(disk.read_file(path, FILE_BYTES_MAX))
        if not isinstance(known, dict):
            raise ValueError("not an object")
        if known.get("format") != FORMAT:
            raise ConfigError(f"{path} has format {known.get('format')!r}; this is {FORMAT}")
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    for name in ("node_id", "cluster_id"):
        if known.get(name) != getattr(identity, name):
            raise ConfigError(
                f"{data_dir} belongs to {name} {known.get(name)!r}, not {getattr(identity, name)!r}"
            )
    before = known.get("incarnation")
    if type(before) is not int or not 0 <= before < 1 << 63:
        raise ConfigError(f"{path} has no incarnation")
    if _logs_incarnation(disk, data_dir) != str(before):
        return Loss("past", before)
    if known.get("clean") is True:
        return Loss("nothing", before, synced=True)
    same_boot = bool(identity.boot_id) and known.get("boot_id") == identity.boot_id
    return Loss("nothing" if same_boot else "tail", before)


def _logs_incarnation(disk: Disk, data_dir: str) -> str:
    path = f"{data_dir}/{MARK}"
    if not disk.exists(path):
        return ""
    return disk.read_file(path, FILE_BYTES_MAX).decode("ascii", "replace").strip()


def remember(disk: Disk, data_dir: str, identity: Identity, clean: bool) -> None:
    """Record that everything in the directory is safe: while this kernel runs or, if `clean`, in
    any case, because everything is synced."""
    body = {
        "format": FORMAT,
        "node_id": identity.node_id,
        "cluster_id": identity.cluster_id,
        "boot_id": identity.boot_id,
        "incarnation": identity.incarnation,
        "clean": clean,
    }
    disk.write_file_atomic(f"{data_dir}/node.json", json.dumps(body).encode())
    disk.make_directory(f"{data_dir}/logs")
    disk.write_file_atomic(f"{data_dir}/{MARK}", str(identity.incarnation).encode())


def boot_id() -> str:
    """Return the id that the kernel has since it started, or "" without one."""
    try:
        with open(BOOT_ID_PATH, encoding="ascii") as file:
            return file.read(100).strip()
    except OSError:
        return ""
