"""These tests need a GPU; without one they are not collected."""

from __future__ import annotations

from tests.gpu.gpus import why_none

collect_ignore_glob = ["test_*.py"] if why_none() else []
