"""One Spark session and one cluster of three nodes for all tests of this folder.

Without PySpark or Java they are skipped, and one line at the end of the run says so.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raftq.chaos.harness.local_cluster import LocalCluster
from raftq.client.common.errors import ConfigError
from raftq.client.sync.admin import Admin

os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
os.environ["PYSPARK_PYTHON"] = sys.executable


def missing() -> str | None:
    """Why Spark cannot run here, or None."""
    try:
        from raftq.client.spark import find_java, local_session  # noqa: F401, PLC0415

        find_java()
    except (ConfigError, ImportError) as error:
        return str(error)
    return None


REASON = missing()


def pytest_collection_modifyitems(items: list[Any]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in Path(item.path).parents:
            item.add_marker(pytest.mark.spark)
            if REASON and "session" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.skip(reason=f"NO SPARK HERE: {REASON}"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if REASON:
        terminalreporter.write_line(
            f"!!! THE SPARK TESTS WERE SKIPPED: {REASON}", red=True, bold=True
        )


@pytest.fixture(scope="session")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from raftq.client.spark import local_session  # noqa: PLC0415

    place = tmp_path_factory.mktemp("spark")
    spark = local_session(
        "local[2, 4]",  # tasks may fail three times, as on a real cluster
        config={
            "spark.sql.warehouse.dir": str(place / "warehouse"),
            "spark.local.dir": str(place / "local"),
            "spark.driver.memory": "1g",
            "spark.driver.extraJavaOptions": f"-Dderby.system.home={place}",
        },
    )
    yield spark
    spark.stop()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("nodes") / "c", 3) as nodes:
        yield nodes


@pytest.fixture(scope="session")
def admin(cluster: LocalCluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap) as client:
        yield client


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A name of its own for each test."""
    return "".join(one if one.isalnum() else "-" for one in request.node.name)[:100]
