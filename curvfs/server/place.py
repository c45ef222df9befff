"""What a server and those who attach to it must agree on: the paths below a directory, and how a server says that it
cannot start. Importing this loads no server."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from curvfs.errors import EnvironmentError_, UsageError
from curvfs.world import World

CLUSTER_ID = "curvine"

#: Exit code of ``python -m curvfs.server`` when another server has the directory.
EXIT_BUSY = 75
#: Begins the line on stderr that says why it ended.
ERROR_PREFIX = "curvfs.server: "


@dataclass(frozen=True, slots=True)
class Directory:
    """The paths below the directory that is served."""

    path: str

    @classmethod
    def at(cls, path: str) -> Directory:
        if not path:
            raise UsageError("The name of the directory to serve is empty; name one, or . for this one.")
        return cls(os.path.realpath(path))

    @property
    def database(self) -> str:
        return f"{self.path}/meta.db"

    @property
    def data(self) -> str:
        return f"{self.path}/data"

    def worker_data(self, number: int) -> str:
        """Where the ``number``-th worker keeps its blocks."""
        return self.data if number == 1 else f"{self.path}/data-{number}"

    @property
    def record(self) -> str:
        return f"{self.path}/server.json"

    @property
    def server_lock(self) -> str:
        return f"{self.path}/server.lock"

    @property
    def users_lock(self) -> str:
        return f"{self.path}/users.lock"

    @property
    def log(self) -> str:
        return f"{self.path}/server.log"

    def prepare(self, world: World) -> None:
        """Make the directory. Raises EnvironmentError_ in one sentence when it cannot be used."""
        try:
            world.disk.makedirs(self.path)
            world.disk.makedirs(self.data)
        except (NotADirectoryError, FileExistsError) as error:
            raise UsageError(f"{self.path} is not a directory; name one, or a path that does not exist yet.") from error
        except OSError as error:
            raise EnvironmentError_(
                f"{self.path} cannot be used to store anything: {os.strerror(error.errno or 0)}; check its "
                "permissions, or name another directory.",
                errno_=error.errno,
            ) from error

    def read_record(self, world: World) -> dict[str, Any]:
        """What the server that ran here last wrote about itself; empty when there is nothing (whole)."""
        try:
            found = json.loads(world.disk.read_file(self.record))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}
