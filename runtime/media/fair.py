"""A queue for a few places, fair by the processor time that each client has used.

Clients form a tree: live sessions and turns of chat; the owners in each; the sessions of each
owner. A free place goes down the tree by fair queueing (Demers, Keshav, Shenker 1989). The children
of a node have a virtual time: the processor time of each active child under equal sharing at every
moment. A child's work starts at that time, or at the end of its work before. The earliest start
goes first; among sessions, the earliest expected end. So a session that uses little goes next, one
that uses much waits, and unused time is not saved.

- A client has one place at a time, and turns of chat never have all places: a live session finds
  one despite one adversary.
- Running work is charged when it ends. The order depends on arrivals and charges, not on a clock.
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
    """The client's waiting work is at its bound."""


@attrs.frozen(kw_only=True, eq=False)
class Client:
    """A session that wants work done; equal only to itself.

    `is_live`: a second of its input waits, not an answer of chat. Sessions of one owner share a
    part.
    """

    is_live: bool = True
    owner: str = ""


@attrs.define(eq=False)
class _Share:
    """A node of the tree.

    Attributes:
        number: decides between equals; the lower goes first.
        path: its ancestors without the root, from the top, and itself.
        finish_s: the end of its charged work, in the virtual time of its siblings.
        now_s: the virtual time of its own children.
        active: children that have work.
        work, running: pieces of work, and those of them that have a place.
        waiting, size: a client's waiting work in order, and the sum of its sizes.
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
        self.path = () if self.parent is None else (*self.parent.path, self)

    @property
    def start_s(self) -> float:
        """The start of its next work, in the virtual time of its siblings."""
        assert self.parent is not None
        return max(self.parent.now_s, self.finish_s)

    @property
    def head(self) -> Place:
        """The first work."""
        return next(iter(self.waiting))

    def count(self, difference: int) -> None:
        """Add to the work here and up to the root."""
        for node in self.path:
            assert node.parent is not None
            node.parent.active -= node.work > 0
            node.work += difference
            node.parent.active += node.work > 0


@attrs.define(eq=False)
class Place:
    """A piece of work; `number` counts all, from 1.

    `starts_s`: its start in the virtual time of each level. `granted`: set when it has its place.
    `used_s`: its processor seconds; set before it is left.
    """

    share: _Share
    number: int
    size: int
    expected_s: float
    starts_s: tuple[float, ...] = ()
    granted: anyio.Event = attrs.Factory(anyio.Event)
    used_s: float = 0.0


class FairQueue:
    """A queue for `places` at once; `size_max` bounds a client's waiting work."""

    def __init__(self, places: int, size_max: float = math.inf) -> None:
        self._size_max: Final = size_max
        self._root = _Share(None, places)
        self._live = _Share(self._root, places, number=0)
        self._turns = _Share(self._root, max(1, places - 1), number=1)
        self._owners: dict[tuple[bool, str], _Share] = {}  # As many as an operator's keys.
        self._clients: WeakKeyDictionary[Client, _Share] = WeakKeyDictionary()
        self._waiting: dict[_Share, None] = {}
        self._asked = 0

    @asynccontextmanager
    async def place(
        self, client: Client, size: int = 0, *, expected_s: float = 0.0
    ) -> AsyncIterator[Place]:
        """Wait for a place and hold it; the body sets its `used_s`.

        `size` is in the unit of `size_max`; above it `TooMuchWaitingError`. `expected_s` is rough
        processor seconds.
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
        """Take back a place and charge it, or remove waiting work."""
        if place.granted.is_set():
            self._root.running -= 1
            for node, start_s in zip(place.share.path, place.starts_s, strict=True):
                assert node.parent is not None
                node.running -= 1
                # The second of two parallel pieces continues at the first one's end.
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
    """The order of a client's next work, level by level; less running work goes first."""
    kind, owner, _ = share.path
    return (
        *(kind.start_s, kind.running, kind.number),
        *(owner.start_s, owner.running, owner.number),
        *(share.start_s + share.head.expected_s, share.head.number),
    )
