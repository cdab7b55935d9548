"""Durations, times and base64 as REST has them."""

import pytest

from raftq.node.http.values import (
    TIME_MS_MAX,
    format_duration,
    format_time,
    parse_base64,
    parse_duration,
    parse_time,
)


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("30s", 30_000),
        ("5m", 300_000),
        ("1h30m", 5_400_000),
        ("250ms", 250),
        ("0s", 0),
        ("0", 0),
        ("0.1s", 100),
        ("1.5h", 5_400_000),
        ("2d", 172_800_000),
        ("0.3ms", 1),
        ("1h1m1s1ms", 3_661_001),
    ],
)
def test_durations_are_read_and_rounded_up(text: str, ms: int) -> None:
    assert parse_duration(text) == ms


@pytest.mark.parametrize(
    "text",
    ["", "30", "s", "-5s", "5 s", "1e3s", "5x", "5S", "1h 30m", "9" * 70 + "s", "999999999999999d",
     "\u0661s", "5s\n", "nan", "infs"],
)  # fmt: skip
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"duration|100 years"):
        parse_duration(text)


@pytest.mark.parametrize("seconds", [0.0, 0.0005, 0.25, 1.0, 59.5, 60, 61, 3600, 5405, 200_000])
def test_a_written_duration_can_be_read(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds * 1000, abs=1)


def test_times_are_rfc_3339_in_utc() -> None:
    assert format_time(1_700_000_000_123) == "2023-11-14T22:13:20.123Z"
    assert parse_time("2023-11-14T22:13:20.123Z") == 1_700_000_000_123
    assert parse_time("2023-11-14t23:13:20+01:00") == 1_700_000_000_000
    assert parse_time("1969-12-31T23:59:59Z") == -1000


@pytest.mark.parametrize("ms", [-(1 << 63), (1 << 63) - 1, TIME_MS_MAX, 0, -1])
def test_any_timestamp_can_be_written(ms: int) -> None:
    assert format_time(ms).endswith("Z")
    assert isinstance(parse_time(format_time(ms)), int)


@pytest.mark.parametrize(
    "text",
    ["", "now", "2023-11-14", "2023-11-14T22:13:20", "2023-13-14T22:13:20Z", "12345",
     "2023-11-14T25:13:20Z", "2023-11-14T22:13:20+99:99", "0000-01-01T00:00:00Z", "9" * 100],
)  # fmt: skip
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no time"):
        parse_time(text)


def test_base64_is_read_strictly() -> None:
    assert parse_base64("AAEC/w==") == b"\x00\x01\x02\xff"
    assert parse_base64("") == b""
    for text in ("A", "AAE", "AA EC", "AAEC\n", "AA==AA==", "é", "-_8="):
        with pytest.raises(ValueError, match="not valid base64"):
            parse_base64(text)
