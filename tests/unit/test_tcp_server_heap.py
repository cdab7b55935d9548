"""Memory of frames stays with the process instead of going to the kernel and back each time."""

import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
from raftq.node.server.heap import keep_heap
if sys.argv[1] == "keep" and not keep_heap():
    sys.exit(3)
def touch(count):
    for _ in range(count):
        one, other = bytearray(300_000), bytearray(300_000)
        del one, other
touch(20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
touch(200)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, how], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode == 3:
        pytest.skip("this C library cannot be told")
    return int(done.stdout)


@pytest.mark.slow
def test_frames_that_come_and_go_cause_no_page_faults() -> None:
    assert faults("keep") < 100
