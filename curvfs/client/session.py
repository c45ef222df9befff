"""What one connected client shares: settings, world, connections, counters and its name."""

from __future__ import annotations

from collections import Counter

import trio

import curvfs
from curvfs.client.localfiles import LocalFiles
from curvfs.client.records import StoragePolicy, StorageType, TtlAction, WorkerAddress
from curvfs.config import ClientConfig
from curvfs.net.cluster import MasterCluster
from curvfs.net.workers import WorkerKey, WorkerPool
from curvfs.wire.messages import pb
from curvfs.world import World


class Session:
    """Connections run in ``nursery`` until :meth:`aclose`."""

    def __init__(self, config: ClientConfig, world: World, nursery: trio.Nursery) -> None:
        self.config = config
        self.world = world
        self.nursery = nursery
        self.stats: Counter[str] = Counter()
        self.hostname = config.hostname or world.net.hostname()
        self.client_name = config.client_name or world.random.uuid()
        self.masters = MasterCluster(config, world, nursery, self.stats)
        self.workers = WorkerPool(config, world, self.stats)
        self.local = LocalFiles(config, world, self.stats, self.hostname)
        self.component_info = pb.ComponentInfoProto(
            component="client",
            release_version=config.release_version or curvfs.__version__,
            protocol_version=1,
            min_protocol_version=1,
        )
        self.client_address = pb.ClientAddressProto(
            client_name=self.client_name, hostname=self.hostname, ip_addr=self.hostname, port=0
        )
        #: Whether the server applies set_attr_opts of a closing CompleteFile; only one that says so is believed (8.4).
        self.knows_set_attr_on_close = False
        #: Whether a worker writes a rewrite of a committed block aside, so that cancelling it restores the block (8.4);
        #: believed only of a server that shows that it is new enough.
        self.rewrites_aside = False
        self.knows_batches = True
        #: (worker id, block id) of write streams that were dropped without an answer: what they sent is still there.
        self.dropped_streams: set[tuple[int, int]] = set()
        #: Blocks with a local write that hangs and may still happen: never opened for writing again.
        self.hung_blocks: set[int] = set()
        #: What new files get, from the settings.
        self.policy = StoragePolicy(
            StorageType[config.storage_type.upper()], config.ttl_ms, TtlAction[config.ttl_action.upper()]
        )
        self._excluded_until_s: dict[int, float] = {}

    def exclude(self, worker_id: int) -> None:
        """Remember that a worker failed a write: it is not asked for again for a while (5.4). From any thread."""
        self._excluded_until_s[worker_id] = self.world.clock.monotonic_s() + self.config.failed_worker_ttl_s

    def excluded(self) -> list[int]:
        """Workers that a new block should not go to. From any thread."""
        now_s = self.world.clock.monotonic_s()
        return sorted(worker_id for worker_id, until_s in list(self._excluded_until_s.items()) if until_s > now_s)

    def readmit(self, worker_id: int) -> None:
        """A worker that failed has taken a block since."""
        self._excluded_until_s.pop(worker_id, None)

    def forgive(self) -> None:
        """Ask all workers again: without those that failed there are none."""
        self._excluded_until_s.clear()

    async def aclose(self) -> None:
        """Close all connections; never raises."""
        self.masters.close()
        await self.workers.aclose()


def worker_key(worker: WorkerAddress) -> WorkerKey:
    """Where the connections to a worker go: its address may be a DNS name, its identity is its id."""
    return WorkerKey(worker.worker_id, worker.address, worker.port)
