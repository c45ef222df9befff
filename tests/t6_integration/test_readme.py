"""The README's Python runs as it stands, but for the directories it names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)

#: What each snippet prints.
PRINTED = (
    "[32768, 32768]\n32 [32768, 32768]\n",
    "b'hello\\n'\n['greeting.txt']\n",
)


@pytest.mark.parametrize("index", range(len(PRINTED)))
def test_snippets_run(index: int, tmp_path: Path) -> None:
    assert len(SNIPPETS) == len(PRINTED)
    code = SNIPPETS[index].replace("/var/tmp", str(tmp_path))
    done = subprocess.run((sys.executable, "-P", "-c", code), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, PRINTED[index], "")
