"""Connections of a server: accept, read requests in order, answer in order, and survive whatever a peer sends.

A frame that cannot be one closes its connection without an answer, as Curvine does (specification section 1.1). What a
handler raises becomes an error reply; what nobody foresaw is logged besides, and the server goes on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from curvfs.errors import CurvfsError, ProtocolError, RemoteError, TransportError
from curvfs.server.oplog import Log
from curvfs.server.refusals import COMMON, IO
from curvfs.world import Listener, Stream

Serve = Callable[[Stream], Awaitable[None]]


def explain(error: Exception, doing: str, log: Log) -> tuple[int, str]:
    """Kind and text of the error reply to a request that failed."""
    if isinstance(error, RemoteError):
        return error.kind, error.text
    if isinstance(error, ProtocolError):
        return COMMON, str(error)
    if isinstance(error, (CurvfsError, OSError)):
        log.error(f"{doing}: {error}")
        return IO, str(error)
    log.bug(doing, error)
    return COMMON, f"{doing} failed inside the server: {type(error).__name__}; its log says more"


async def accept(listener: Listener, serve: Serve, log: Log) -> None:
    """Serve every connection to a listener, each in a task of its own, until cancelled."""

    async def one(stream: Stream) -> None:
        try:
            await serve(stream)
        except TransportError:
            pass  # the peer went away; nobody is left to tell
        except ProtocolError as error:
            log.info(f"{stream.peer}: {error}")
        except Exception as error:  # one connection must not take the others along
            log.bug(f"serving {stream.peer}", error)
        finally:
            await stream.aclose()

    async with trio.open_nursery() as nursery:
        while True:
            nursery.start_soon(one, await listener.accept())
