"""The benchmark itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tools import kvbench


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_it_prints_ratios_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--sizes", "256KiB", "--depths", "2,4", "--rounds", "2", "--bytes", "1MiB"]
    code = kvbench.main([str(tmp_path), *shape, "--json"])
    out, err = capsys.readouterr()
    if code and "direct" in err:
        pytest.skip("no direct I/O here")
    assert code == 0, err
    records = json.loads(out)["records"]
    assert [(record["size_bytes"], record["depth"], record["rounds"]) for record in records] == [
        (1 << 18, 2, 2),
        (1 << 18, 4, 2),
    ]
    for record in records:
        for median, low, high in record["figures"].values():
            assert 0 <= low <= median <= high
        assert record["figures"]["get / fio"][0] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert kvbench.main(["/no/such/place"]) == 1
    assert capsys.readouterr().err.startswith("kvbench: /no/such/place is not a directory")
