"""The ready-made jobs, end to end, as their commands are typed."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raftq.client.sync.consumer import Consumer
from raftq.client.sync.producer import Producer
from raftq.client.sync.queue_client import QueueClient
from raftq.node.cli import app

RUNNER = CliRunner()
WHOLE_S = 180
SUBMITTED_S = 400  # a second Spark has to start, on a machine that may be busy
HOUR_MS = 3_600_000
NOW_MS = int(time.time() * 1000)
START_MS = NOW_MS // HOUR_MS * HOUR_MS - 2 * HOUR_MS  # recent: retention keeps it
PNG = b"\x89PNG\r\n\x1a\n"


def raftq(cluster, *arguments, code=0):
    """Run `raftq spark ...` in this process, in the session that is there; what it printed."""
    done = RUNNER.invoke(app, ["--bootstrap", cluster.bootstrap, "spark", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done


def said(cluster, *arguments):
    return json.loads(raftq(cluster, *arguments, "--format", "json").stdout)


def utc(ms):
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(ms // 1000))


def records(cluster, admin, topic):
    parts = admin.describe_topic(topic).partitions
    ends = {one.partition: one.high_watermark for one in parts}
    found = {one: [] for one in ends}
    with Consumer(cluster.bootstrap) as consumer:
        consumer.assign([(topic, one) for one in ends])
        while any(len(found[one]) < end for one, end in ends.items()):
            for record in consumer.poll(5000, timeout=5):
                row = (record.value, record.key, dict(record.headers), record.timestamp)
                found[record.partition].append((*row, record.priority))
    return found


def send(bootstrap, topic, numbers, start_ms=None):
    """Values v0, v1, ... over two partitions; a second apart when `start_ms` is given."""
    with Producer(bootstrap) as producer:
        for number in numbers:
            at = None if start_ms is None else start_ms + number * 1000
            producer.send(
                topic, b"v%d" % number, key=b"k%d" % (number % 10), headers={"n": b"%d" % number},
                partition=number % 2, timestamp=at,
            )  # fmt: skip
        producer.flush()


def archived_values(session, place):
    from raftq.client.spark import pipelines  # noqa: PLC0415 - where there is none this is skipped

    rows = pipelines.archived(session, str(place)).select("value").collect()
    return sorted(int(bytes(row.value)[1:]) for row in rows)


def test_an_archive_is_incremental_and_its_replay_gives_the_same_records_once(
    session, cluster, admin, topic, tmp_path
):
    """
    1. A topic is archived, gets more records, and is archived again: only those are added.
    2. The archive is replayed to another topic, twice under one id.
    3. That topic holds the same records, partition by partition in the same order.
    """
    for name in (topic, f"{topic}-copy"):
        admin.create_topic(name, partitions=2, replication=3)
    send(cluster.bootstrap, topic, range(500))
    told = raftq(cluster, "archive", tmp_path, "--topics", topic, "--batch", 300)
    assert told.stdout.startswith("500 records archived in ")
    assert "batch 1: 200 records, 500 in " in told.stderr
    send(cluster.bootstrap, topic, range(500, 700))
    assert said(cluster, "archive", tmp_path, "--topics", topic)["records"] == 200
    assert archived_values(session, tmp_path) == list(range(700))
    for _ in range(2):
        arguments = (tmp_path, topic, "--to", f"{topic}-copy", "--id", topic)
        assert said(cluster, "replay", *arguments)["records"] == 700
    assert records(cluster, admin, f"{topic}-copy") == records(cluster, admin, topic)


@pytest.mark.full
def test_a_replay_takes_a_range_of_time_and_keeps_to_its_rate(
    session, cluster, admin, topic, tmp_path
):
    name = "0071"  # a topic's name, and no number
    for one in (name, f"{topic}-part"):
        admin.create_topic(one, partitions=2, replication=3)
    send(cluster.bootstrap, name, range(400), START_MS)
    raftq(cluster, "archive", tmp_path, "--pattern", "00[67]1", "--quiet")
    days = sorted(one.name for one in (tmp_path / "data" / f"topic={name}").iterdir())
    assert days == sorted({f"date={utc(START_MS + n * 1000)[:10]}" for n in (0, 399)})
    span = ("--since", utc(START_MS + 100_000), "--until", utc(START_MS + 300_000))
    done = said(cluster, "replay", tmp_path, name, "--to", f"{topic}-part", *span, "--rate", 50)
    assert done["records"] == 200
    assert done["seconds"] >= 3.8, "200 records at 50 a second are 4 s, but for the first batch"
    found = records(cluster, admin, f"{topic}-part")
    assert [row[0] for row in found[0]] == [b"v%d" % n for n in range(100, 300, 2)]
    assert [row[3] for row in found[1]] == [START_MS + n * 1000 for n in range(101, 300, 2)]
    late = ("--since", utc(START_MS + 10 * HOUR_MS))
    failed = raftq(cluster, "replay", tmp_path, name, "--to", f"{topic}-part", *late, code=1)
    assert failed.stderr == f"error: {tmp_path} holds no records of topic '{name}' in this range\n"


@pytest.mark.full
def test_an_archive_of_spark_submit_that_is_killed_goes_on_and_holds_every_record_once(
    session, cluster, admin, topic, tmp_path
):
    """
    1. spark-submit runs an archive in many micro-batches.
    2. When some are safe, it is killed with all of its processes, in the middle of one.
    3. Records arrive; the archive is run again here, and has every record once.
    """
    from raftq.client.spark import find_java  # noqa: PLC0415

    admin.create_topic(topic, partitions=2, replication=3)
    send(cluster.bootstrap, topic, range(6000))
    file = RUNNER.invoke(app, ["spark", "file"]).stdout.strip()
    submit = Path(sys.executable).with_name("spark-submit")
    arguments = ["archive", str(tmp_path), "--topics", topic, "--batch", "100"]
    job = subprocess.Popen(
        [submit, "--master", "local[2]", "--conf", "spark.ui.enabled=false", file, *arguments],
        env={**os.environ, "RAFTQ_BOOTSTRAP": cluster.bootstrap, "JAVA_HOME": find_java()},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    watchdog = threading.Timer(SUBMITTED_S, os.killpg, (job.pid, signal.SIGKILL))
    watchdog.start()
    lines = []
    for line in job.stdout:
        lines.append(line)
        if line.startswith("batch 1: 100 records, 200 in "):
            break
    os.killpg(job.pid, signal.SIGKILL)
    watchdog.cancel()
    job.wait()
    job.stdout.close()
    assert lines[-1].startswith("batch 1"), "".join(lines)
    before = archived_values(session, tmp_path)
    assert 200 <= len(before) < 6000, "it was killed too late: this proves nothing"
    send(cluster.bootstrap, topic, range(6000, 6100))
    raftq(cluster, "archive", tmp_path, "--topics", topic)
    assert archived_values(session, tmp_path) == list(range(6100))


@pytest.mark.full
def test_an_archive_that_retention_has_overtaken_says_so_and_goes_on_when_told(
    session, cluster, admin, topic, tmp_path
):
    config = {"segment_bytes": 4096, "retention_bytes": 8192}
    admin.create_topic(topic, partitions=1, replication=1, config=config)
    sent = 0
    deadline = time.monotonic() + WHOLE_S
    while (first := admin.describe_topic(topic).partitions[0].start_offset) <= 50:
        with Producer(cluster.bootstrap) as producer:
            for number in range(sent, sent + 50):
                producer.send(topic, b"v%d" % number, headers={"pad": b" " * 200})
            producer.flush()
        sent += 50
        if sent == 50:
            assert said(cluster, "archive", tmp_path, "-t", topic)["records"] == 50
        assert time.monotonic() < deadline, "retention takes nothing"
    failed = raftq(cluster, "archive", tmp_path, "-t", topic, code=1)
    assert re.fullmatch(rf"error: offsets \[50, \d+\) of {topic}/0 are lost.*\n", failed.stderr)
    raftq(cluster, "archive", tmp_path, "-t", topic, "--skip-lost")
    found = archived_values(session, tmp_path)
    assert found[:50] == list(range(50))
    assert found[50] >= first
    assert found[50:] == list(range(found[50], sent))


@pytest.mark.full
def test_compaction_keeps_the_last_record_of_each_key(session, cluster, admin, topic, tmp_path):
    """
    1. Ten keys get ten records each, then partitions are added.
    2. One key moves to a new partition, where offsets begin at 0; one key is deleted.
    3. The table has the newest value of each key that is left.
    """
    admin.create_topic(topic, partitions=2, replication=3)
    send(cluster.bootstrap, topic, range(100), START_MS)
    admin.add_partitions(topic, 3)
    with Producer(cluster.bootstrap) as producer:
        producer.send(topic, b"moved", key=b"k4", partition=2, timestamp=START_MS + 200_000)
        producer.send(topic, b"", key=b"k5", partition=1, timestamp=START_MS + 200_000)
        producer.send(topic, b"nobody's", partition=2)
        producer.flush()
    assert said(cluster, "compact", topic, tmp_path / "t")["records"] == 9
    rows = session.read.parquet(str(tmp_path / "t")).collect()
    found = {bytes(row.key): bytes(row.value) for row in rows}
    last = {b"k%d" % n: b"v%d" % (90 + n) for n in range(10)}
    del last[b"k5"]
    assert found == {**last, b"k4": b"moved"}


def reject_all(cluster, topic, group, reasons):
    """Lease every record of a topic and give it up; the reason is that of its value."""
    left = len(reasons)
    with QueueClient(cluster.bootstrap, group=group, topics=[topic]) as queue:
        deadline = time.monotonic() + WHOLE_S
        while left:
            assert time.monotonic() < deadline, f"{left} records were not leased"
            for record in queue.lease(max_records=100, timeout=5.0):
                reason = reasons[int(record.value)]
                queue.reject(record, reason, f"error of {reason}")
                left -= 1


def letters_there(admin, topic, count):
    deadline = time.monotonic() + WHOLE_S
    while len(admin.dead_letters(topic, limit=1000)) < count:
        assert time.monotonic() < deadline, "letters are missing"
        time.sleep(0.1)


@pytest.mark.full
def test_dead_letters_are_counted_by_topic_group_reason_and_time(
    session, cluster, admin, topic, tmp_path
):
    """
    1. Two groups give up the records of two topics, for several reasons.
    2. The report over both counts them, as its JSON, its table and its picture say.
    3. A topic without letters is none, and its report is empty.
    """
    names = [f"{topic}-a", f"{topic}-b", f"{topic}-c"]
    for name in names:
        admin.create_topic(name, partitions=2, replication=3)
    reasons = ["bad address"] * 30 + ["costs $5 \N{GREEK SMALL LETTER ALPHA}"] * 12
    for name in names[:2]:
        with Producer(cluster.bootstrap) as producer:
            for number in range(len(reasons)):
                producer.send(name, b"%d" % number, partition=number % 2)
            producer.flush()
    reject_all(cluster, names[0], "mail", reasons)
    reject_all(cluster, names[0], "bill", reasons)
    reject_all(cluster, names[1], "mail", reasons)
    letters_there(admin, names[0], 84)
    letters_there(admin, names[1], 42)

    report = said(cluster, "dlq-report", tmp_path / "r", "--pattern", f"{topic}-.*")
    kinds = [(row["topic"], row["group"], row["reason"], row["letters"]) for row in report["rows"]]
    a, b = names[:2]
    assert (report["letters"], report["kinds"]) == (126, 6)
    assert kinds == [
        *[(name, group, reasons[0], 30) for name, group in ((a, "bill"), (a, "mail"), (b, "mail"))],
        *[(name, group, reasons[-1], 12)
          for name, group in ((a, "bill"), (a, "mail"), (b, "mail"))],
    ]  # fmt: skip
    first = report["rows"][0]
    assert (first["attempts_max"], first["last_error"]) == (1, "error of bad address")
    assert NOW_MS <= first["first"] <= first["last"] <= int(time.time() * 1000)
    rows = session.read.parquet(report["table"]).collect()
    assert sum(row.letters for row in rows) == 126
    assert {row.bucket.timestamp() % 3600 for row in rows} == {0}
    assert Path(report["picture"]).read_bytes().startswith(PNG)

    printed = raftq(cluster, "dlq-report", tmp_path / "b", "-t", b, "--bucket", "10m").stdout
    assert printed.startswith("42 dead letters")
    assert "71.4%" in printed
    none = said(cluster, "dlq-report", tmp_path / "c", "--topics", f"{names[2]}.dlq")
    assert (none["letters"], none["rows"]) == (0, [])
    late = ("--since", utc(NOW_MS + HOUR_MS), "--picture", tmp_path / "p.png")
    assert said(cluster, "dlq-report", tmp_path / "l", "-t", a, *late)["letters"] == 0
    assert (tmp_path / "p.png").read_bytes().startswith(PNG)


@pytest.mark.full
def test_latency_counts_from_a_header_a_field_or_a_record_upstream(
    session, cluster, admin, topic, tmp_path
):
    """
    1. 200 records upstream; each has one downstream that is 1, 2, ... 200 ms later, in two minutes.
    2. Two more downstream know no origin, one has an origin after itself.
    3. All ways to tell the origin give the same percentiles.
    """
    up, down = f"{topic}-up", f"{topic}-down"
    for name in (up, down):
        admin.create_topic(name, partitions=2, replication=3)
    with Producer(cluster.bootstrap) as producer:
        for number in range(200):
            at = START_MS + number % 2 * 60_000
            trace = b"t%d" % number
            producer.send(up, b"x", key=b"k%d" % number, timestamp=at - HOUR_MS)  # an older story
            producer.send(up, b"x", key=b"k%d" % number, timestamp=at, headers={"trace": trace})
            value = json.dumps({"made": {"at": utc(at)}}).encode()
            producer.send(
                down, value, key=b"k%d" % number, timestamp=at + number + 1,
                headers={"trace": trace, "made": b"%d" % at},
            )  # fmt: skip
        producer.send(down, b"no json", timestamp=START_MS)
        producer.send(down, b"{}", timestamp=START_MS, headers={"made": b"\xffno time"})
        early = {"made": b"%d" % (START_MS + 50)}
        producer.send(down, b"{}", timestamp=START_MS, headers=early)
        producer.flush()

    def row(name, *options):
        report = said(cluster, "latency-report", tmp_path / name, "--topics", down, *options)
        (only,) = report["rows"]
        assert only.pop("topic") == down
        return only, report

    exact = {"p50_ms": 100, "p90_ms": 180, "p99_ms": 198, "max_ms": 200}
    traced = ("--origin", f"topic:{up}", "--match", "header:trace")
    known = {"records": 203, "without_origin": 3, "early": 0, **exact}
    assert row("key", "--origin", f"topic:{up}")[0] == known
    assert row("json", "--origin", "json:made.at")[0] == known
    found, report = row("header", "--origin", "header:made", "--bucket", "1m")
    assert (found["without_origin"], found["early"], found["max_ms"]) == (2, 1, 200)
    buckets = session.read.parquet(report["table"]).orderBy("bucket").collect()
    assert [one.bucket.timestamp() * 1000 for one in buckets] == [START_MS, START_MS + 60_000]
    assert (buckets[1].records, buckets[1].p50_ms, buckets[1].max_ms) == (100, 100, 200)
    assert Path(report["picture"]).read_bytes().startswith(PNG)
    printed = raftq(cluster, "latency-report", tmp_path / "t", "-t", down, *traced).stdout
    assert re.search(r"203 .* 3 .* 0 .* 100 ms .* 180 ms .* 198 ms .* 200 ms", printed)


@pytest.mark.parametrize(
    ("arguments", "why", "code"),
    [
        (["archive", "PATH", "-t", "nothing-here"], "no topic is named 'nothing-here'", 1),
        (["archive", "PATH", "--pattern", "nothing-[hx]ere"], "no topic matches", 1),
        (["archive", "PATH", "--pattern", "["], "is no regular expression", 2),
        (["archive", "PATH"], "an archive needs --topics or --pattern", 2),
        (["compact", "TOPIC", "FILE/below"], "cannot be written to: Not a directory", 1),
        (["dlq-report", "PATH", "-t", "nothing-here"], "no topic is named", 1),
        (["dlq-report", "PATH", "--bucket", "soon"], "is no duration such as", 2),
        (["replay", "PATH", "TOPIC"], "there is no archive at", 2),
        (["replay", "PATH", "TOPIC", "--since", "now"], "is no time such as", 2),
        (["latency-report", "PATH", "-t", "TOPIC", "--origin", "x"], "an origin is header:", 2),
        (["latency-report", "PATH", "--origin", "header:a"], "needs --topics or --pattern", 2),
        (["--bootstrap", "127.0.0.1:1", "compact", "a", "PATH"], "no node of the cluster", 1),
        (["compact", "TOPIC", "strange://place"], 'No FileSystem for scheme "strange"', 1),
    ],
)
def test_what_is_wrong_is_one_sentence(session, cluster, admin, tmp_path, arguments, why, code):
    if "errors-here" not in admin.list_topics():
        admin.create_topic("errors-here", partitions=1, replication=3)
    (tmp_path / "file").touch()
    places = {"PATH": str(tmp_path / "x"), "TOPIC": "errors-here"}
    words = [places.get(one, one.replace("FILE", str(tmp_path / "file"))) for one in arguments]
    if words[0] == "--bootstrap":
        failed = RUNNER.invoke(app, [*words[:2], "spark", *words[2:]])
        assert failed.exit_code == code
    else:
        failed = raftq(cluster, *words, code=code)
    assert failed.stdout == ""
    assert failed.stderr.startswith("error: ")
    assert failed.stderr.count("\n") == 1
    assert why in failed.stderr
    assert "Traceback" not in failed.stderr
