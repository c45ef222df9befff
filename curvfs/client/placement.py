"""Which workers get new blocks: those whose writes failed get none for a while (specification 5.4)."""

from __future__ import annotations

from curvfs.client.session import Session


class Placement:
    """What one client knows of its workers' writes. Where the others have no room, all are asked again. Callable from
    any thread."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def avoided(self) -> tuple[int, ...]:
        """Ids of the workers that get no new blocks."""
        return tuple(self._session.excluded())

    def avoid(self, worker_id: int) -> None:
        """As after a write that failed: for ``failed_worker_ttl_s``, or until :meth:`readmit`."""
        self._session.exclude(worker_id)

    def readmit(self, worker_id: int) -> None:
        """It takes blocks again."""
        self._session.readmit(worker_id)
