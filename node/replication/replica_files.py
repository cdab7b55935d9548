"""The files of replicas: logs are opened one by one, a replica is removed as a whole. (Shell.)

logs/{topic}-{topic id}/{partition}/data/       the logs, see partition_log.py
                                    ledger/     these two have the snapshots of their producers
                                    delays/     inside; those of the data are beside it
                                    producers-*.snapshot
                                    removed     marks a removal: what is left here has no meaning
"""

import logging
from collections.abc import Iterable

from raftq.client.common.disk import Disk
from raftq.client.common.errors import ConfigError, DiskFull
from raftq.cluster.metadata.state import ClusterState
from raftq.cluster.metadata.topic_config import TopicConfig
from raftq.node.config import StorageConfig
from raftq.node.identity import MARK_NAME
from raftq.node.replication.partition_log import (
    DATA,
    DELAYS,
    NAMES,
    known_producers,
    producers_directory,
)
from raftq.node.replication.partition_ref import PartitionRef
from raftq.node.storage.checkpoint import is_truncated
from raftq.node.storage.config import LogConfig
from raftq.node.storage.log import Log
from raftq.node.storage.producers import Producers

logger = logging.getLogger(__name__)

REMOVED = "removed"
# By log number. A service cuts a log at any offset, but only whole segments are freed. For delays a
# few large segments are better, because records are read from all of them at once.
SEGMENT_BYTES_MAX = (1 << 30, 16 * 1024 * 1024, 64 * 1024 * 1024)


def directory_of(data_dir: str, topic: str, topic_id: int) -> str:
    return f"{data_dir}/logs/{topic}-{topic_id:x}"


def make_directory(disk: Disk, directory: str) -> None:
    """Make the directory of a replica. Removes first what an earlier removal has left."""
    if disk.exists(f"{directory}/{REMOVED}"):
        disk.remove_directory(directory)
    disk.make_directory(directory)


def open_logs(
    disk: Disk,
    ref: PartitionRef,
    numbers: Iterable[int],
    config: TopicConfig,
    storage: StorageConfig,
    now_ms: int,
) -> list[tuple[Log, Producers]]:
    """Open all of these logs, or none of them when the disk is full."""
    opened: list[tuple[Log, Producers]] = []
    try:
        for number in numbers:
            partition_log = open_log(disk, ref, number, config, storage, now_ms)
            opened.append(partition_log)
    except BaseException:
        for log, _ in opened:
            log.close(clean=False)
        raise
    return opened


def open_log(
    disk: Disk,
    ref: PartitionRef,
    number: int,
    config: TopicConfig,
    storage: StorageConfig,
    now_ms: int,
) -> tuple[Log, Producers]:
    """Open a log, and create it when it is missing. Returns what is known of its producers, too."""
    log = Log.open(
        disk,
        f"{ref.directory}/{NAMES[number]}",
        LogConfig(
            segment_bytes=min(config.segment_bytes, SEGMENT_BYTES_MAX[number]),
            with_lanes=number == DATA,
            # Delayed records are read again, one by one, when they are due: the kernel knows best.
            page_cache_bytes=None if number == DELAYS else storage.page_cache_bytes,
            write_behind_bytes=storage.write_behind_bytes,
            seal_sync=False,
        ),
        now_ms,
    )
    try:
        if log.damaged:
            logger.error("partition=%s %s damaged=%s", ref, NAMES[number], log.damaged)
        directory = producers_directory(ref.directory, number)
        producers = known_producers(log, directory, storage.producers_max)
        producers.expire(now_ms, storage.producer_idle_ms)
    except BaseException:
        log.close(clean=False)
        raise
    return log, producers


def truncated_logs(disk: Disk, data_dir: str) -> list[str]:
    """Return the directories of logs, not opened yet, that have lost bytes known to be durable."""
    logs = f"{data_dir}/logs"
    if not disk.exists(logs):
        return []
    directories = (
        f"{logs}/{topic}/{number}"
        for topic in disk.list(logs)
        if topic != MARK_NAME
        for number in disk.list(f"{logs}/{topic}")
    )
    return [
        f"{directory}/{name}"
        for directory in directories
        if not disk.exists(f"{directory}/{REMOVED}")
        for name in NAMES
        if is_truncated(disk, f"{directory}/{name}")
    ]


def remove_replica(disk: Disk, directory: str) -> None:
    """Remove a replica's files. A crash must not leave half a log that looks whole."""
    if not disk.exists(directory):
        return  # it was moved back, and removed with its topic before this removal was confirmed
    try:
        disk.write_file_atomic(f"{directory}/{REMOVED}", b"removed")
    except DiskFull:
        # There is no room for the mark. Removing the newest file first leaves a shorter log.
        for name in reversed(NAMES):
            if disk.exists(f"{directory}/{name}"):
                for file in reversed(disk.list(f"{directory}/{name}")):
                    disk.remove(f"{directory}/{name}/{file}")
    disk.remove_directory(directory)


def remove_deleted(disk: Disk, data_dir: str, state: ClusterState, me: int) -> None:
    """Remove what was deleted or moved away while this node was down."""
    logs = f"{data_dir}/logs"
    disk.make_directory(logs)
    for name in disk.list(logs):
        if name == MARK_NAME:
            continue
        topic, _, digits = name.rpartition("-")
        try:
            topic_id = int(digits, 16)
        except ValueError:
            raise ConfigError(f"{logs}/{name} is not the directory of a topic") from None
        if topic_id >= state.topic_id_next:
            raise ConfigError(
                f"{logs}/{name} belongs to a topic that this cluster has not created yet: "
                "the data directory is from another cluster"
            )
        known = state.topic_by_id(topic_id)
        if known is None:
            logger.info("topic=%s id=%x was deleted", topic, topic_id)
            disk.remove_directory(f"{logs}/{name}")
            continue
        for number in disk.list(f"{logs}/{name}"):
            held = number.isdecimal() and int(number) < len(known.partitions)
            if held and me in known.partitions[int(number)].replicas:
                continue
            remove_replica(disk, f"{logs}/{name}/{number}")
