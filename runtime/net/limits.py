"""Connection limits: places, rates, and the memory of incoming messages.

- `ConnectionLimiter`: places for connections in all and for one address, and new ones a second for
  it (a token bucket of `AddressRateLimiter`; a refused connection costs no token, so that a refused
  client is admitted again at the rate). An IPv6 address counts by its /64, an IPv4 address written
  as IPv6 as IPv4.
- `RateLimiter`: token buckets for the messages and bytes of one connection. A bucket holds a few
  seconds' worth, so that an uneven client is not slowed; beyond it the reader waits, TCP slows the
  sender, and no connection is closed. Bytes are paid after they were read: a bucket may be in debt
  by one read.
- `Budget`: room for the incoming messages of all connections; `LargeMessageLimiter`: their turns.
- `Counters`: what a listener counts; its parts write it, a status has a copy, causes are labels of
  metrics.

Time comes from the caller, in seconds; only `Share.hold` waits. An operator's limits are in
`Settings`.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Final, Literal
from weakref import WeakValueDictionary

import anyio
import anyio.lowlevel
import attrs

from ..settings.settings import Settings

RECEIVING_BYTES_MAX: Final = 256 * 1024 * 1024
"""Messages on their way in, over all connections: two or three of the largest, or a dozen videos
from phones. Until it is decoded a message costs three times this."""
LARGE_BYTES_MIN: Final = 1 << 20
"""A second of sound with its pictures is less, and must arrive within seconds."""
UNCOUNTED_BYTES: Final = 16 * 1024
"""Of a message in progress: 64 MiB for the most connections."""


# -- what is counted -------------------------------------------------------------------------------


Refusal = Literal["full", "address", "rate", "tls", "silent", "head"]
"""No place in all, no place for its address, too many of its address lately, no TLS, no byte in
time, no HTTP in time."""
Drop = Literal["stalled", "silent", "slow", "left"]
"""It took nothing, or too slowly; sent nothing; delayed others' large messages with a slow one; or
left while it was held to its rate."""


@attrs.define(kw_only=True, eq=False)
class Counters:
    """The counts of one listener, all from zero: open now, and since the start by cause.

    `websockets` are part of `connections`; `pauses` of readers above their rate.
    """

    connections: int = 0
    websockets: int = 0
    refused: Counter[Refusal] = attrs.field(factory=Counter)
    dropped: Counter[Drop] = attrs.field(factory=Counter)
    pauses: int = 0
    receiving_bytes: int = 0

    def copy(self) -> Counters:
        """Copy the current counts."""
        return attrs.evolve(self, refused=self.refused.copy(), dropped=self.dropped.copy())


# -- new connections of an address -----------------------------------------------------------------


ADDRESSES_MAX: Final = 16_384
"""A bucket takes 300 bytes: five megabytes in all. The places of all bound a client with more
addresses."""


class AddressRateLimiter:
    """The buckets of one listener, for `per_s` new connections on average.

    A bucket is full at first, with `burst`; the last `addresses_max` are kept.
    """

    def __init__(self, per_s: float, burst: int, addresses_max: int = ADDRESSES_MAX) -> None:
        assert per_s > 0
        self._per_s = per_s
        self._burst = max(1, burst)
        self._addresses_max = addresses_max
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, origin: str, now_s: float) -> bool:
        """Pay for a new connection from an address (`origin_of`); False if it cannot."""
        left, at_s = self._buckets.pop(origin, (float(self._burst), now_s))
        left = min(float(self._burst), left + (now_s - at_s) * self._per_s)
        is_enough = left >= 1.0
        self._buckets[origin] = (left - is_enough, now_s)
        if len(self._buckets) > self._addresses_max:
            self._buckets.popitem(last=False)
        return is_enough


# -- the rate of one connection --------------------------------------------------------------------


BURST_S: Final = 3.0
"""A mobile network holds so much back in a tunnel and then delivers it at once."""
PARTY_SHARE: Final = 25
"""One in so many of an address's connections may use its whole rate: 20 by default, as much as 80
sessions that send sound in pieces of 20 ms, and half of a core. Behind a proxy, where all clients
have one address, an operator raises the number of its connections."""
FRAGMENT_BYTES_MIN: Final = 1024
"""A smaller fragment costs as much as a message: no client has a reason to send many of them."""
FRAGMENT_COST: Final = 0.125
"""Of a message: a fragment costs a tenth of the work, and large messages may come in many."""


class RateLimiter:
    """The buckets of one WebSocket, of messages and of bytes, both full at first.

    One message of `message_bytes_max` may come at once, at any rate. Below zero a bucket is in
    debt. `shared`: the buckets of all WebSockets of its party, which it also pays from.
    """

    def __init__(
        self,
        messages_per_s: float,
        bytes_per_s: float,
        message_bytes_max: int,
        now_s: float,
        shared: RateLimiter | None = None,
    ) -> None:
        assert messages_per_s > 0
        assert bytes_per_s > 0
        self._messages_per_s = messages_per_s
        self._bytes_per_s = bytes_per_s
        self._messages_max = self.messages = max(1.0, BURST_S * messages_per_s)
        self._bytes_max = self.size_bytes = max(BURST_S * bytes_per_s, float(message_bytes_max))
        self._at_s = now_s
        self._shared = shared

    @property
    def messages_left(self) -> float:
        """Messages that may be read now."""
        shared = self._shared or self
        return min(self.messages, shared.messages)

    def wait_s(self, now_s: float) -> float:
        """The wait until one more message, of any size, may be read; 0.0 for none."""
        passed_s = now_s - self._at_s
        self._at_s = now_s
        self.messages = min(self._messages_max, self.messages + passed_s * self._messages_per_s)
        self.size_bytes = min(self._bytes_max, self.size_bytes + passed_s * self._bytes_per_s)
        shared_s = 0.0 if self._shared is None else self._shared.wait_s(now_s)
        if self.messages >= 1.0 and self.size_bytes >= 0.0:
            return shared_s
        for_messages_s = (1.0 - self.messages) / self._messages_per_s
        return max(for_messages_s, -self.size_bytes / self._bytes_per_s, shared_s)

    def take(self, messages: float, size_bytes: int) -> None:
        """Pay for messages and bytes that were read, into debt if needed."""
        self.messages -= messages
        self.size_bytes -= size_bytes
        if self._shared is not None:
            self._shared.take(messages, size_bytes)


class PartyRates:
    """The buckets of each party (a key, or an address) with an open WebSocket.

    All WebSockets of a party have the rate of one in `PARTY_SHARE` of those that an address may
    have: a few dozen could stop the event loop, each within its own rate.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._websockets = max(1, settings.connections_per_address_max // PARTY_SHARE)
        self._shared = WeakValueDictionary[str, RateLimiter]()

    def of(self, party: str, message_bytes_max: int, now_s: float) -> RateLimiter:
        """Make the buckets of a WebSocket."""
        messages, size_bytes = self._settings.messages_per_s_max, self._settings.bytes_per_s_max
        shared = self._shared.get(party)
        if shared is None:
            shared = self._shared[party] = RateLimiter(
                self._websockets * messages, self._websockets * size_bytes, message_bytes_max, now_s
            )
        return RateLimiter(messages, size_bytes, message_bytes_max, now_s, shared)


# -- open connections ------------------------------------------------------------------------------


NETWORK_BITS: Final = 64
"""Of an IPv6 address: the network's owner chooses the rest freely."""


class ConnectionLimiter:
    """The places of one listener; `has_files`: descriptors are left for another connection."""

    def __init__(
        self, settings: Settings, counters: Counters, has_files: Callable[[], bool] = lambda: True
    ) -> None:
        self._settings = settings
        self._has_files = has_files
        self._counters = counters
        self._entered: dict[str, int] = {}
        self._arrivals = AddressRateLimiter(
            settings.connections_per_address_per_s_max, settings.connections_per_address_max
        )

    def enter(self, host: str, now_s: float) -> Refusal | None:
        """Take a place for a connection from `host`, or return the cause of the refusal."""
        origin = origin_of(host)
        entered = self._entered.get(origin, 0)
        refusal: Refusal | None = None
        if self._counters.connections >= self._settings.connections_max or not self._has_files():
            refusal = "full"
        elif entered >= self._settings.connections_per_address_max:
            refusal = "address"
        elif not self._arrivals.take(origin, now_s):
            refusal = "rate"
        if refusal is not None:
            self._counters.refused[refusal] += 1
            return refusal
        self._entered[origin] = entered + 1
        self._counters.connections += 1
        return None

    def leave(self, host: str) -> None:
        """Give back the place that `enter` took for `host`."""
        origin = origin_of(host)
        self._counters.connections -= 1
        self._entered[origin] -= 1
        if not self._entered[origin]:
            del self._entered[origin]


def origin_of(host: str) -> str:
    """The address by which a client counts: its own, or its /64."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, NETWORK_BITS), strict=False))


# -- the memory of incoming messages ---------------------------------------------------------------


LARGE_WAIT_S: Final = 120.0
"""The largest message over a home's uplink, 6 Mbit/s."""
SMALL_WAIT_S: Final = 10.0
"""A megabyte over an uplink of 1 Mbit/s; later it is of no use to a call."""


class Budget:
    """Room of `bytes_max` for incoming messages, shared by all connections of a listener.

    - A connection reserves the bytes of its message in progress; without room its reading pauses,
      and TCP slows the sender. A message keeps its room until its reader asks for the next one.
    - A message within its share, the room divided by the messages in progress, always gets room: a
      second of sound waits for no video. So does the oldest incomplete one once no complete one is
      unread: none waits for ever. That exceeds the room by as much again, and one message, at most.
    - While others wait, the oldest has `LARGE_WAIT_S` to complete, and each small one
      `SMALL_WAIT_S`; then its connection is dropped.

    `counters.receiving_bytes` is kept here.
    """

    def __init__(self, bytes_max: int, counters: Counters) -> None:
        self._bytes_max = bytes_max
        self._counters = counters
        self._in_progress: dict[Share, None] = {}
        self._unread_bytes = 0
        self._freed = anyio.Event()
        self._waiting: dict[Share, None] = {}

    @property
    def is_tight(self) -> bool:
        """More than half of the room is taken, what waits for it apart: read little at a time."""
        return self._counters.receiving_bytes > self._bytes_max // 2

    def laggards(self, now_s: float) -> tuple[Share, ...]:
        """The shares whose messages keep others waiting and have had their time."""
        if not self._waiting:
            return ()
        eldest = next(iter(self._in_progress))
        return tuple(
            share
            for share in self._in_progress
            if share not in self._waiting and share.is_overdue(now_s, is_eldest=share is eldest)
        )

    # -- for `Share` ----------------------------------------------------------------------------

    async def take(self, share: Share, size_bytes: int) -> None:
        """Wait for room and take it, in the order in which messages began."""
        if share not in self._in_progress:
            self._in_progress[share] = None
            share.since_s = anyio.current_time()
        if self._fits(share, size_bytes):
            self._counters.receiving_bytes += size_bytes
            return
        self._waiting[share] = None
        try:
            while not self._fits(share, size_bytes):
                freed = self._freed
                await freed.wait()
        finally:
            del self._waiting[share]
        self._counters.receiving_bytes += size_bytes

    def _fits(self, share: Share, size_bytes: int) -> bool:
        if self._counters.receiving_bytes + size_bytes <= self._bytes_max:
            return True
        if share.held_bytes + size_bytes <= self._bytes_max // len(self._in_progress):
            return True
        return not self._unread_bytes and next(iter(self._in_progress)) is share

    def finish(self, share: Share, size_bytes: int) -> None:
        """A message of so many bytes is complete, and is to be read."""
        del self._in_progress[share]
        self._unread_bytes += size_bytes
        self._wake()

    def free(self, unread_bytes: int) -> None:
        """Free the room of messages that were read, or will not be."""
        self._counters.receiving_bytes -= unread_bytes
        self._unread_bytes -= unread_bytes
        self._wake()

    def give_up(self, share: Share, held_bytes: int) -> None:
        """Free the room of an incomplete message, if there is one."""
        self._counters.receiving_bytes -= held_bytes
        self._in_progress.pop(share, None)
        self._wake()

    def _wake(self) -> None:
        if self._waiting:
            self._freed.set()
            self._freed = anyio.Event()


class Share:
    """What one connection holds of a budget.

    `since_s` is when its message in progress began to take room, `held_bytes` are of that message.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.held_bytes = 0
        self._unread: dict[int, int] = {}
        self.since_s = 0.0

    def is_overdue(self, now_s: float, *, is_eldest: bool) -> bool:
        """Whether its message in progress has had its time; among large ones only the eldest's."""
        if self.held_bytes > LARGE_BYTES_MIN:
            return is_eldest and now_s - self.since_s >= LARGE_WAIT_S
        return now_s - self.since_s >= SMALL_WAIT_S

    async def hold(self, size_bytes: int) -> None:
        """Wait until there is room for the message in progress, `size_bytes` of which are here."""
        more = size_bytes - self.held_bytes
        if more > 0:
            await self.budget.take(self, more)
            self.held_bytes += more

    def finish(self, number: int) -> None:
        """The message in progress, the `number`-th, is complete."""
        if self.held_bytes:
            self._unread[number] = self.held_bytes
            self.budget.finish(self, self.held_bytes)
            self.held_bytes = 0

    def release(self, number: int) -> None:
        """Free the `number`-th message's room: it was read, and the next is asked for."""
        if self._unread:
            unread_bytes = self._unread.pop(number, 0)
            if unread_bytes:
                self.budget.free(unread_bytes)

    def close(self) -> None:
        """Free everything: the connection is over, and `hold` is not called any more."""
        self.budget.free(sum(self._unread.values()))
        self.budget.give_up(self, self.held_bytes)
        self._unread.clear()
        self.held_bytes = 0


# -- large messages --------------------------------------------------------------------------------


BYTES_PER_S_MAX: Final = 32 << 20
"""A fifth of a core: two sessions at their own rate limit (`bytes_per_s_max`)."""


class LargeMessageLimiter:
    """Limits the large messages of one server: one at a time over all sessions, at a bounded rate.

    The event loop reads a message in one go: 5 ms or more for each megabyte, in which no other
    session is served. The limiter leaves time for the others. One message of a session waits at a
    time, and they pass in order of arrival. Realtime messages are not large and never wait here.
    """

    def __init__(self) -> None:
        self._lock = anyio.Lock()
        self._free_at_s = 0.0

    async def wait(self, size_bytes: int) -> None:
        """Wait until a message may be read; a small one never waits."""
        if size_bytes <= LARGE_BYTES_MIN:
            return
        async with self._lock:
            now_s = anyio.current_time()
            if now_s < self._free_at_s:
                await anyio.sleep_until(self._free_at_s)
            self._free_at_s = max(now_s, self._free_at_s) + size_bytes / BYTES_PER_S_MAX
