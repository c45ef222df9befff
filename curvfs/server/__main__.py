"""``python -m curvfs.server DIR``: serve a directory without the command line's dependencies."""

from __future__ import annotations

import sys

from curvfs.server.program import main

if __name__ == "__main__":
    sys.exit(main())
