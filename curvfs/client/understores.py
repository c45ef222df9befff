"""Calls about under stores and the jobs that load from them (specification 3.6, 3.8 and 4.19).

The master does all of it; this client speaks to no under store. What a directory that was tied to one allows here
afterwards is :mod:`curvfs.client.mounts`'s part. No cluster with an under store was at hand: the messages are those of
the specification, their effects are untried.
"""

from __future__ import annotations

import errno
import re
from urllib.parse import urlsplit

from curvfs.client import convert, paths
from curvfs.client.mastercalls import MasterCalls
from curvfs.client.mounts import MountTable
from curvfs.client.records import JobStatus, LoadJob, MountOptions, MountPoint
from curvfs.errors import InvalidRequest, NotFound, RemoteError
from curvfs.net.cluster import Progress
from curvfs.wire.codes import RpcCode
from curvfs.wire.messages import pb

_STORE = re.compile(r"[a-z][a-z0-9+.-]*://[^/].*", re.IGNORECASE | re.DOTALL)


class UnderStores:
    """Mounts and load jobs of one client; :attr:`CurvineFileSystem.under_stores`."""

    def __init__(self, calls: MasterCalls, mounts: MountTable, root: str) -> None:
        self._calls = calls
        self._mounts = mounts
        self._root = root

    async def table(self) -> tuple[MountPoint, ...]:
        """Directories that are tied to an under store, as full paths of the namespace (GetMountTable)."""
        return await self._mounts.refresh()

    async def find(self, path: str) -> MountPoint | None:
        """The mount that ``path`` lies in, as the master knows it (GetMountInfo); None outside of all."""
        return await self._find(self._full(path))

    async def mount(self, path: str, ufs_path: str, options: MountOptions, *, update: bool = False) -> MountPoint:
        """Tie a directory to ``ufs_path`` (``s3://bucket/prefix``), or with ``update`` change how it is tied (Mount).

        Mounts do not nest: one inside or around another is refused here (EBUSY), and so is the root. Raises
        Unsupported where the server has no under stores, RemoteError with the master's reason else.
        """
        full = self._full(path)
        doing = f"mount {_shown(ufs_path)} at {full}"
        if not _STORE.fullmatch(ufs_path):
            raise InvalidRequest(f"Cannot {doing}: an under store is written like s3://bucket/prefix.")
        if full == "/":
            raise InvalidRequest(f"Cannot {doing}: the root belongs to Curvine; name a directory below it.")
        for point in await self._mounts.refresh():
            same = point.path == full
            if (same and not update) or paths.is_below(full, point.path) or paths.is_below(point.path, full):
                raise InvalidRequest(
                    f"Cannot {doing}: {point.ufs_path} is mounted at {point.path}, and mounts do not nest; "
                    f"{'update or ' if same else ''}unmount that one first.",
                    errno_=errno.EBUSY,
                )
        request = pb.MountRequest(
            cv_path=full, ufs_path=ufs_path, mount_options=convert.mount_options(options, update=update)
        )
        progress = Progress()
        try:
            await self._calls.call(RpcCode.MOUNT, request, pb.MountResponse, doing, progress=progress)
        except RemoteError:  # a replay is executed again, and may find its own mount (4.2)
            found = await self._find(full) if progress.uncertain else None
            if found is None or (found.path, found.ufs_path) != (full, ufs_path):
                raise
        await self._mounts.refresh()
        found = await self._find(full)
        if found is None:
            raise NotFound(f"Cannot {doing}: the master accepted it, and does not know it now.")
        return found

    async def unmount(self, path: str) -> None:
        """Untie a directory from its under store (UnMount). Raises NotFound where nothing is mounted at ``path``."""
        full = self._full(path)
        doing = f"unmount {full}"
        if full not in (point.path for point in await self._mounts.refresh()):
            raise NotFound(f"Cannot {doing}: no under store is mounted there.")
        progress = Progress()
        try:
            await self._calls.call(
                RpcCode.UNMOUNT, pb.UnMountRequest(cv_path=full), pb.UnMountResponse, doing, progress=progress
            )
        except RemoteError:
            if not progress.uncertain or await self._find(full) is not None:
                raise
        await self._mounts.refresh()

    async def submit_load(self, job: LoadJob) -> JobStatus:
        """Ask the master to load ``job.source_path``, the URL of a file or directory in a mounted under store
        (SubmitJob). Asking again answers with the same job. Raises Unsupported where there are no under stores."""
        source = job.source_path
        if not _STORE.fullmatch(source):
            raise InvalidRequest(f"Cannot load {source}: a source is written like s3://bucket/file.")
        request = pb.SubmitJobRequest(job_type=pb.LOAD, job_command=convert.load_command(job))
        answer = await self._calls.call(RpcCode.SUBMIT_JOB, request, pb.SubmitJobResponse, f"load {_shown(source)}")
        return convert.job_submitted(answer, source)

    async def job_status(self, job_id: str, *, verbose: bool = False) -> JobStatus:
        """How far a job has come (GetJobStatus). Raises RemoteError of kind 23 for one that is not known."""
        request = pb.GetJobStatusRequest(job_id=job_id, verbose=verbose)
        doing = f"look for the job {job_id}"
        return convert.job_status(
            await self._calls.call(RpcCode.GET_JOB_STATUS, request, pb.GetJobStatusResponse, doing)
        )

    async def cancel_job(self, job_id: str) -> None:
        """Stop a job (CancelJob); what it has loaded stays. Raises RemoteError of kind 23 for an unknown one."""
        request = pb.CancelJobRequest(job_id=job_id)
        await self._calls.call(RpcCode.CANCEL_JOB, request, pb.CancelJobResponse, f"cancel the job {job_id}")

    async def _find(self, full: str) -> MountPoint | None:
        request = pb.GetMountInfoRequest(path=full)
        answer = await self._calls.call(
            RpcCode.GET_MOUNT_INFO, request, pb.GetMountInfoResponse, f"look for the mount of {full}"
        )
        return convert.mount_point(answer.mount_info) if answer.HasField("mount_info") else None

    def _full(self, path: str) -> str:
        return paths.join(self._root, paths.normalize(path))


def _shown(url: str) -> str:
    """A URL without what may be a password."""
    found = urlsplit(url)
    return url if "@" not in found.netloc else found._replace(netloc=found.netloc.rpartition("@")[2]).geturl()
