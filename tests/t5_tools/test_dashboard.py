"""The dashboard asks only for metrics that are there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from curvfs.world import World
from mount.statistics import Statistics
from tests.t3_kvstore.places import Directory
from tests.t3_kvstore.test_metrics import GEOMETRY

ROOT = Path(__file__).parents[2]
#: What a report adds to the statistics of a mount; see mount.report.
_OF_REPORT = {"curvfs_mount_objects", "curvfs_mount_open_files", "curvfs_mount_nodes", "curvfs_mount_private_files"}


def expressions(panels: list[dict[str, Any]]) -> Iterator[str]:
    for panel in panels:
        for target in panel.get("targets", ()):
            yield target["expr"]


def test_every_metric_of_the_dashboard_exists(tmp_path: Path) -> None:
    dashboard = json.loads((ROOT / "docs/grafana/curvfs.json").read_text())
    asked = {name for text in expressions(dashboard["panels"]) for name in re.findall(r"curvfs_\w+", text)}
    with Directory(tmp_path).open(GEOMETRY) as store:
        known = {family.name: family.kind for family in store.metrics()}
    world = World.real()
    known |= {family.name: family.kind for family in Statistics(world.clock, slow_call_s=1.0).families()}
    known |= {name: "counter" if name == "curvfs_mount_objects" else "gauge" for name in _OF_REPORT}
    source = (ROOT / "mount/report.py").read_text()
    assert all(f'"{name}"' in source for name in _OF_REPORT)
    shown = set()
    for name, kind in known.items():
        shown |= {name} if kind == "gauge" else {f"{name}_total"} if kind == "counter" else set()
        shown |= {f"{name}_{end}" for end in ("bucket", "count", "sum")} if kind == "histogram" else set()
    assert asked and asked <= shown, asked - shown
