"""The part of the demo that needs FUSE: mount, list, read in three ways, try to overwrite, unmount."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import trio
import xxhash
from safetensors import safe_open

from curvfs.errors import CurvfsError, EnvironmentError_
from curvfs.units import format_size
from curvfs.world import World
from tools.demo_process import run_command, run_curvfs
from tools.demo_report import Checks, Say

#: What is not run where FUSE cannot be had.
STEPS = (
    "the mount",
    "the list of objects on it",
    "safetensors.safe_open on it",
    "dd iflag=direct on it",
    "the refused overwrite",
    "the unmount",
)

#: Names of the tensors that only align the others.
_PADDING = ".pad."
#: How many objects the list shows before it only counts.
_SHOWN = 5


def is_mounted(path: Path) -> bool:
    """Is something mounted exactly there? Asks the kernel's table, which answers for a dead mount too."""
    wanted = os.path.abspath(path)
    lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    return any(line.split(" ")[1].encode().decode("unicode_escape") == wanted for line in lines)


async def mount(pool: Path, mountpoint: Path, say: Say, checks: Checks) -> bool:
    """Mount the pool; False, said in one line, where FUSE cannot be had."""
    say(f"$ curvfs mount --embedded {pool} {mountpoint} --background")
    with trio.CancelScope(shield=True):  # never half-way: what is mounted must be known, to be unmounted
        done = await run_curvfs("mount", "--embedded", str(pool), str(mountpoint), "--background")
    if done.returncode == EnvironmentError_.exit_code:
        reason = done.stderr.strip().removeprefix("curvfs: ")
        say(f"FUSE cannot be had here ({reason}) Not run: {', '.join(STEPS)}.")
        checks.skip(*STEPS)
        return False
    if done.returncode != 0:
        raise CurvfsError(f"The mount failed: {done.stderr.strip() or done.stdout.strip()}")
    checks.check(is_mounted(mountpoint), f"{mountpoint} is a mount")
    return True


async def unmount(mountpoint: Path) -> bool:
    """Unmount, in any case; true when that went as it should."""
    done = await run_curvfs("umount", str(mountpoint))
    if is_mounted(mountpoint):
        await run_curvfs("umount", "--lazy", str(mountpoint))
        return False
    return done.returncode == 0


async def look_around(mountpoint: Path, digests: Sequence[str], world: World, say: Say, checks: Checks) -> None:
    """List the objects on the mount, one for each of the ``digests`` of stored pages, and use one as a stranger
    would."""
    found = await world.threads.run(_find_objects, mountpoint)
    say(f"$ find {mountpoint} -name '*.safetensors'")
    for path in found[:_SHOWN]:
        say(f"{path.relative_to(mountpoint)}  {format_size(path.stat().st_size)}")
    say(f"... {len(found)} objects, {format_size(sum(path.stat().st_size for path in found))} in all")
    checks.check(len(found) == len(digests), f"the mount shows {len(digests)} stored pages (it shows {len(found)})")
    if not found:
        return
    sample = found[-1]
    before = await world.threads.run(world.disk.read_file, str(sample))
    say(f'$ python -c "safetensors.safe_open({sample.name!r}, ...)"')
    say(await world.threads.run(_open_safetensors, sample, digests, checks))
    await _read_direct(sample, len(before), say, checks)
    say(f"$ echo overwritten > {sample.name}")
    refusal = await world.threads.run(_overwrite, sample, world)
    say(refusal or "(it was overwritten)")
    checks.check(refusal is not None, "a published object cannot be overwritten")
    after = await world.threads.run(world.disk.read_file, str(sample))
    checks.check(before == after, "the object holds the same bytes after that")


def _find_objects(mountpoint: Path) -> list[Path]:
    """Every object on the mount, by name."""
    return sorted(mountpoint.rglob("*.safetensors"))


def _open_safetensors(path: Path, digests: Sequence[str], checks: Checks) -> str:
    """Read every tensor through safetensors and compare with what was stored; one line about them."""
    with safe_open(path, framework="np") as opened:
        names = [name for name in opened.keys() if not name.startswith(_PADDING)]  # noqa: SIM118
        tensors = {name: opened.get_tensor(name) for name in sorted(names, key=_layer_and_kind)}
    digest = xxhash.xxh3_128()
    for tensor in tensors.values():
        digest.update(tensor.tobytes())
    checks.check(digest.hexdigest() in digests, "safetensors reads from the mount what replica A stored")
    name, first = next(iter(tensors.items()))
    size_bytes = sum(tensor.nbytes for tensor in tensors.values())
    return f"{len(tensors)} tensors, {format_size(size_bytes)}; {name}: {first.dtype} {list(first.shape)}"


def _layer_and_kind(name: str) -> tuple[int, str]:
    """Sorts ``layer.<i>.<k or v>`` as a page holds them."""
    _, layer, kind = name.split(".")
    return int(layer), kind


async def _read_direct(path: Path, size_bytes: int, say: Say, checks: Checks) -> None:
    """Read an object with O_DIRECT, as dd does it."""
    say(f"$ dd if={path.name} of=/dev/null bs=1M iflag=direct")
    done = await run_command(("dd", f"if={path}", "of=/dev/null", "bs=1M", "iflag=direct"), timeout_s=60)
    lines = done.stderr.strip().splitlines()
    say(lines[-1] if lines else "(dd printed nothing)")
    checks.check(
        done.returncode == 0 and lines[-1].startswith(f"{size_bytes} bytes"),
        f"dd reads all {size_bytes} bytes with O_DIRECT",
    )


def _overwrite(path: Path, world: World) -> str | None:
    """Try to open an object for write; the system's answer when it refuses."""
    try:
        opened = world.disk.open(str(path), os.O_WRONLY | os.O_TRUNC)
    except OSError as error:
        return f"{error.strerror}"
    world.disk.close(opened)
    return None
