"""``python -m tests.gpu``: the tests that need a GPU, in at most five minutes; one sentence where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.gpu.gpus import why_none

LIMIT_S = 290


def main() -> int:
    reason = why_none()
    if reason:
        print(f"There is no GPU to test with here: {reason}.", file=sys.stderr)
        return 1
    command = [sys.executable, "-m", "pytest", "-v", "--timeout", "60", str(Path(__file__).parent)]
    try:
        return subprocess.run(command, timeout=LIMIT_S).returncode
    except subprocess.TimeoutExpired:
        print(f"The GPU tests were not done within {LIMIT_S} s and were stopped.", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
