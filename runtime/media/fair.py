"""Whose work comes next: a few places, shared by the processor time that each client has used.

Clients form a tree: live sessions and turns of chat, in each the owners, of each the sessions.
Where several want a place, it goes down the tree by fair queueing (Demers, Keshav, Shenker 1989).
The children of a node have a virtual time: the processor time that each of those that want some
would have had by now, had it been shared equally at every moment. A child's work begins at that
time, or where its work before ended. The earliest goes first; of sessions, the one whose work is
expected to end earliest. So a session that uses little is next whenever it comes, one that uses
much comes behind, and time that was not used is not saved up.

Rules:

- A client has one place at a time, and turns of chat never have all: a live session finds a place
  beside one adversary, however long that takes.
- Work that has begun is not stopped: it is charged when it ends.
- What a client may have waiting is bounded, by sizes that its caller gives.
- The order depends on who came when and what was charged, not on a clock.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final
from weakref import WeakKeyDictionary

import anyio
import attrs


class TooMuchWaitingError(Exception):
    """A client has as much waiting as it may have."""


@attrs.frozen(kw_only=True, eq=False)
class Client:
    """A session that wants work done; each is another, whatever its attributes.

    Attributes:
        is_live: a second of its input waits for the work; else an answer of chat does.
        owner: the name of its key; sessions of one owner share its part.
    """

    is_live: bool = True
    owner: str = ""


@attrs.define(eq=False)
class _Share:
    """A node of the tree.

    Attributes:
        parent: whose part it shares; None at the root.
        places: that all of it may have at once.
        number: decides between equals; the lower goes first.
        path: its ancestors without the root, from the top, and itself.
        finish_s: up to where it has used its part, in the virtual time that it shares with its
            siblings.
        now_s: the virtual time of its own children.
        active: children that have work.
        work: pieces of work that wait or run.
        running: of these, those that have a place.
        waiting: of a client, its work in the order in which it came.
        size: of what waits.
    """

    parent: _Share | None
    places: int
    number: int = 0
    path: tuple[_Share, ...] = attrs.field(init=False)
    finish_s: float = 0.0
    now_s: float = 0.0
    active: int = 0
    work: int = 0
    running: int = 0
    waiting: dict[Place, None] = attrs.Factory(dict)
    size: int = 0

    def __attrs_post_init__(self) -> None:
        """Find its place in the tree."""
        self.path = () if self.parent is None else (*self.parent.path, self)

    @property
    def start_s(self) -> float:
        """Where its next work begins, in the same time."""
        assert self.parent is not None
        return max(self.parent.now_s, self.finish_s)

    @property
    def head(self) -> Place:
        """The work that came first."""
        return next(iter(self.waiting))

    def count(self, difference: int) -> None:
        """Count work that came or is over, here and up to the root."""
        for node in self.path:
            assert node.parent is not None
            node.parent.active -= node.work > 0
            node.work += difference
            node.parent.active += node.work > 0


@attrs.define(eq=False)
class Place:
    """A piece of work, from the time that it is asked for.

    Attributes:
        share: its client's.
        number: counts all work, from 1.
        size: as its caller gave it.
        expected_s: as its caller gave it.
        starts_s: where it began in the virtual time of each level.
        granted: set when it has its place.
        used_s: processor seconds that it took; set before it is left.
    """

    share: _Share
    number: int
    size: int
    expected_s: float
    starts_s: tuple[float, ...] = ()
    granted: anyio.Event = attrs.Factory(anyio.Event)
    used_s: float = 0.0


class FairQueue:
    """A queue for a few places.

    Args:
        places: pieces of work under way at once.
        size_max: of what one client may have waiting; what has begun does not count.
    """

    def __init__(self, places: int, size_max: float = math.inf) -> None:
        self._size_max: Final = size_max
        self._root = _Share(None, places)
        self._live = _Share(self._root, places, number=0)
        self._turns = _Share(self._root, max(1, places - 1), number=1)
        self._owners: dict[tuple[bool, str], _Share] = {}  # As many as an operator made keys.
        self._clients: WeakKeyDictionary[Client, _Share] = WeakKeyDictionary()
        self._waiting: dict[_Share, None] = {}
        self._asked = 0

    @asynccontextmanager
    async def place(
        self, client: Client, size: int = 0, *, expected_s: float = 0.0
    ) -> AsyncIterator[Place]:
        """Wait for a place and hold it; the body sets its `used_s`.

        Args:
            client: who asks.
            size: of the work, in the unit of `size_max`.
            expected_s: processor seconds that it may take, roughly.

        Raises:
            TooMuchWaitingError: this much more may not wait.
        """
        place = self._enter(client, size, expected_s)
        try:
            self._fill()
            await place.granted.wait()
            yield place
        finally:
            self._leave(place)
            self._fill()

    def _enter(self, client: Client, size: int, expected_s: float) -> Place:
        share = self._share_of(client)
        if share.size + size > self._size_max:
            raise TooMuchWaitingError
        self._asked += 1
        place = Place(share, self._asked, size, expected_s)
        share.size += size
        share.waiting[place] = None
        self._waiting[share] = None
        share.count(1)
        return place

    def _share_of(self, client: Client) -> _Share:
        share = self._clients.get(client)
        if share is None:
            key = (client.is_live, client.owner)
            kind = self._live if client.is_live else self._turns
            new = _Share(kind, kind.places, number=len(self._owners))
            share = _Share(self._owners.setdefault(key, new), places=1)
            self._clients[client] = share
        return share

    def _fill(self) -> None:
        """Give free places to those that are next."""
        while self._root.running < self._root.places:
            able = (share for share in self._waiting if _may_run(share))
            share = min(able, key=_order, default=None)
            if share is None:
                return
            self._grant(share)

    def _grant(self, share: _Share) -> None:
        place = share.head
        self._forget(place)
        place.starts_s = tuple(node.start_s for node in share.path)
        self._root.running += 1
        for node in share.path:
            node.running += 1
        place.granted.set()

    def _leave(self, place: Place) -> None:
        """Take back a place and charge for it, or take back what waits for one."""
        if place.granted.is_set():
            self._root.running -= 1
            for node, start_s in zip(place.share.path, place.starts_s, strict=True):
                assert node.parent is not None
                node.running -= 1
                # Of several at once the second goes on from where the first came to.
                node.finish_s = max(node.finish_s, start_s) + place.used_s
                node.parent.now_s += place.used_s / node.parent.active
        else:
            self._forget(place)
        place.share.count(-1)

    def _forget(self, place: Place) -> None:
        share = place.share
        del share.waiting[place]
        share.size -= place.size
        if not share.waiting:
            del self._waiting[share]


def _may_run(share: _Share) -> bool:
    return all(node.running < node.places for node in share.path)


def _order(share: _Share) -> tuple[float, ...]:
    """Say how early a client's next work is, level by level.

    What is under way is not charged yet: between equals those go first that have less of it.
    """
    kind, owner, _ = share.path
    return (
        *(kind.start_s, kind.running, kind.number),
        *(owner.start_s, owner.running, owner.number),
        *(share.start_s + share.head.expected_s, share.head.number),
    )
