"""The README's example does what it says."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_readme_example_runs_as_it_stands(tmp_path: Path) -> None:
    examples = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(examples) == 1
    script = tmp_path / "example.py"
    script.write_text(examples[0])
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    *audited, letters, counts = done.stdout.splitlines()
    assert len(audited) == 8, "six messages and two that were shipped"
    assert letters == "['cannot read this order'] 1"
    assert counts == "9 pending, 1 delayed"
