"""Wheel and sdist, built from this checkout and installed where only declared dependencies can be seen."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import curvfs

ROOT = Path(__file__).parents[2]
PACKAGES = ("curvfs", "kvstore", "mount", "tools")


def run(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=100, **options)  # type: ignore[call-overload,no-any-return]


def build(source: Path, target: Path, *kinds: str) -> list[Path]:
    """Build ``kinds`` ("wheel", "sdist") of a source tree; what was built."""
    flags = [argument for kind in kinds for argument in ("-t", kind)]
    done = run(sys.executable, "-m", "hatchling", "build", "-d", target, *flags, cwd=source)
    assert done.returncode == 0, done.stderr
    return sorted(target.iterdir())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(sdist, wheel) of this checkout."""
    wheel, sdist = build(ROOT, tmp_path_factory.mktemp("dist"), "sdist", "wheel")
    assert sdist.name == f"curvfs-{curvfs.__version__}.tar.gz"
    return sdist, wheel


def requirements(extras: Sequence[str]) -> set[str]:
    """Names of everything that curvfs[extras] requires, directly or not."""
    found: set[str] = set()
    pending = [Requirement(f"curvfs[{','.join(extras)}]")]
    while pending:
        wanted = pending.pop()
        for line in importlib.metadata.requires(wanted.name) or ():
            needed = Requirement(line)
            if needed.marker is not None and not any(
                needed.marker.evaluate({"extra": extra}) for extra in ("", *wanted.extras)
            ):
                continue
            if needed.name not in found or needed.extras:
                found.add(needed.name)
                pending.append(needed)
    return found - {"curvfs"}


def installed(wheel: Path, home: Path, *extras: str) -> Path:
    """A fresh environment with the wheel in it and, of everything else, only what curvfs[extras] declares."""
    run(sys.executable, "-m", "venv", "--without-pip", home)
    python = home / "bin" / "python"
    done = run(sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", wheel)
    assert done.returncode == 0, done.stderr
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())
    for name in requirements(extras):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                os.symlink(Path(str(distribution.locate_file(top))), site / top)
    return python


def names_in_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_the_packages_their_types_and_the_licence(built: tuple[Path, Path]) -> None:
    names = names_in_wheel(built[1])
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert {name.partition("/")[0] for name in names} == {*PACKAGES, f"curvfs-{curvfs.__version__}.dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.endswith((".pyc", ".log")) for name in names)


def test_the_sdist_builds_the_same_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    sdist, wheel = built
    assert run("tar", "-xf", sdist, "-C", tmp_path).returncode == 0
    (source,) = tmp_path.iterdir()
    (again,) = build(source, tmp_path / "dist", "wheel")
    assert names_in_wheel(again) == names_in_wheel(wheel)
    assert (source / "Makefile").is_file() and (source / ".ci" / "setup").is_file()


def test_the_client_alone_needs_neither_fuse_nor_torch_nor_the_command_line(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    python = installed(built[1], tmp_path / "venv")
    done = run(python, "-P", "-c", "import curvfs.api, sys; print(curvfs.__version__, *sorted(sys.modules))")
    assert done.returncode == 0, done.stderr
    version, *modules = done.stdout.split()
    assert version == curvfs.__version__
    assert not {"torch", "pyfuse3", "typer", "rich", "xxhash", "numpy"} & set(modules)
    command = run(tmp_path / "venv" / "bin" / "curvfs", "--version")
    assert command.returncode == 3
    assert "pip install 'curvfs[cli]'" in command.stderr and command.stderr.count("\n") == 1


def test_kvstore_needs_no_torch(built: tuple[Path, Path], tmp_path: Path) -> None:
    python = installed(built[1], tmp_path / "venv", "kv")
    done = run(python, "-P", "-c", "import kvstore, sys; print(*sorted(sys.modules))")
    assert done.returncode == 0, done.stderr
    assert not {"torch", "pyfuse3", "typer", "numpy"} & set(done.stdout.split())


def test_the_command_needs_no_fuse_until_something_is_mounted(built: tuple[Path, Path], tmp_path: Path) -> None:
    installed(built[1], tmp_path / "venv", "cli")
    command = tmp_path / "venv" / "bin" / "curvfs"
    done = run(command, "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"curvfs {curvfs.__version__}\n", "")
    (tmp_path / "mnt").mkdir()
    done = run(command, "mount", "--embedded", tmp_path / "pool", tmp_path / "mnt")
    assert done.returncode == 3
    assert "pip install 'curvfs[fuse]'" in done.stderr and done.stderr.count("\n") == 1
