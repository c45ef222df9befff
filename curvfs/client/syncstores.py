"""The same for plain threads: the calls of :class:`~curvfs.client.understores.UnderStores`, blocking."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from curvfs.client.records import JobStatus, LoadJob, MountOptions, MountPoint
from curvfs.client.understores import UnderStores

if TYPE_CHECKING:
    from curvfs.client.sync import SyncFileSystem


class SyncUnderStores:
    """Mounts and load jobs of one client; :attr:`SyncFileSystem.under_stores`."""

    def __init__(self, client: SyncFileSystem) -> None:
        self._client = client  # keeps it open

    @property
    def _stores(self) -> UnderStores:
        return self._client.filesystem.under_stores

    def table(self) -> tuple[MountPoint, ...]:
        return self._client.portal.run(self._stores.table)

    def find(self, path: str) -> MountPoint | None:
        return self._client.portal.run(self._stores.find, path)

    def mount(self, path: str, ufs_path: str, options: MountOptions, *, update: bool = False) -> MountPoint:
        return self._client.portal.run(partial(self._stores.mount, path, ufs_path, options, update=update))

    def unmount(self, path: str) -> None:
        self._client.portal.run(self._stores.unmount, path)

    def submit_load(self, job: LoadJob) -> JobStatus:
        return self._client.portal.run(self._stores.submit_load, job)

    def job_status(self, job_id: str, *, verbose: bool = False) -> JobStatus:
        return self._client.portal.run(partial(self._stores.job_status, job_id, verbose=verbose))

    def cancel_job(self, job_id: str) -> None:
        self._client.portal.run(self._stores.cancel_job, job_id)
