"""A worker at its address: it greets gateways, and lends them the slots of one backend.

- A bad gateway costs only itself: it has `HELLO_WAIT_S` to greet, and no more than `LINKS_MAX`
  connections are held.
- The worker ends, as an error, when its backend is gone, and when a call hangs and no other session
  is left: only another process can serve then. Gateways see that it is gone.
"""

from __future__ import annotations

import heapq
import logging
import ssl
from collections.abc import Callable
from typing import Any, Final

import anyio
import attrs
from anyio.abc import ByteStream, Listener, TaskGroup
from anyio.streams.tls import TLSStream

from ..link.errors import LinkError, LinkLeft
from ..link.hello import Wire, greet_gateway
from ..link.limits import HELLO_WAIT_S, LINKS_MAX
from ..model.backends.base import Backend, BackendError, BackendGone
from .gateway import GatewayLink

_logger = logging.getLogger("antiphon.worker")
_LEFT: Final = (LinkLeft, anyio.EndOfStream, anyio.BrokenResourceError)
"""A health check connects and leaves, every few seconds."""


@attrs.define(eq=False, kw_only=True)
class Worker:
    """Serves one backend; `tasks` are its calls and links, whose scope it cancels at its end.

    `token`: shared with gateways; empty for none. `tls`: makes the context of a new connection.
    `lost_because`: why it ended by itself, or empty.
    """

    backend: Backend
    tasks: TaskGroup
    token: str = ""
    tls: Callable[[], ssl.SSLContext] | None = None
    lost_because: str = ""
    _free: list[int] = attrs.field(init=False)
    _withheld: int = 0
    _links: int = 0

    def __attrs_post_init__(self) -> None:
        self._free = list(range(self.backend.info.slots))

    async def serve(self, listener: Listener[Any]) -> None:
        """Serve gateways until cancelled."""
        await listener.serve(self._meet, self.tasks)

    # -- slots ----------------------------------------------------------------------------------

    @property
    def leased(self) -> int:
        """The number of slots that sessions hold."""
        return self.backend.info.slots - len(self._free) - self._withheld

    def lease(self, wanted: int) -> int:
        """Lease a free slot, `wanted` if it is one; `BackendError` where none is free."""
        if self._withheld:
            raise BackendGone("a call hangs in the worker, which will end")
        if not self._free:
            raise BackendError("no slot of the worker is free: other gateways hold them")
        if wanted in self._free:
            self._free.remove(wanted)
            heapq.heapify(self._free)
            return wanted
        return heapq.heappop(self._free)

    def give_back(self, slot: int, *, is_clean: bool) -> None:
        """Take a slot back; one that is not clean is never leased again."""
        if is_clean:
            heapq.heappush(self._free, slot)
        else:
            _logger.error("slot %d is withheld: its call hangs or broke", slot)
            self._withheld += 1
        if self._withheld and not self.leased:
            self._end("a call hangs in the model")

    def lost(self, error: BackendGone) -> None:
        """The backend is gone: end."""
        if not self._withheld:
            self._end(str(error))

    def _end(self, why: str) -> None:
        self.lost_because = self.lost_because or why
        self.tasks.cancel_scope.cancel()

    # -- gateways -------------------------------------------------------------------------------

    async def _meet(self, stream: ByteStream) -> None:
        """Greet a connection and serve it until it is lost."""
        if self._links >= LINKS_MAX:
            _logger.error("a connection is refused: there are %d already", self._links)
            await anyio.aclose_forcefully(stream)
            return
        self._links += 1
        try:
            link = await self._greet(stream)
            if link is not None:
                _logger.info("a gateway has come")
                await link.link.run()
        finally:
            self._links -= 1
            await anyio.aclose_forcefully(stream)

    async def _greet(self, stream: ByteStream) -> GatewayLink | None:
        try:
            with anyio.fail_after(HELLO_WAIT_S):
                if self.tls is not None:
                    stream = await TLSStream.wrap(
                        stream,
                        server_side=True,
                        ssl_context=self.tls(),
                        standard_compatible=False,
                    )
                wire = Wire(stream)
                info = self.backend.info
                await greet_gateway(wire, self.token, info)
                return GatewayLink(wire, self, speaks=info.speaks)
        except _LEFT:
            _logger.info("a connection has left before it greeted")
        except (LinkError, TimeoutError, OSError) as error:
            _logger.warning("a connection is dropped: %s", error or type(error).__name__)
        except Exception:  # A bug of ours costs this connection, and no other.
            _logger.exception("a connection could not be greeted")
        return None
