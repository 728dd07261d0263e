"""A client's connections to one session that can be resumed, as one `Link` (docs/resume.md).

It is lost when its plan says so, or a trap of its link does, and comes back as `Visit` says. It
holds the server to the numbers: each frame follows the one before it, what is said again is what
was said, no right but the last lets anybody in, and a second connection replaces the first. What it
heard is compared with the log by the simulation.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal

import anyio
import attrs

from protocol.values.errors import CLOSE_NORMAL, CLOSE_POLICY, CLOSE_TRY_LATER
from protocol.values.messages import ResumeRequest
from tests.simulation.simulated_socket import Link, LinkPlan

How = Literal["alone", "twice", "wrong", "old", "takeover"]
"""One connection; two with the same token; one with a wrong or an old token before it; one while
the last is still open."""
FINAL: Final = frozenset({CLOSE_NORMAL, CLOSE_POLICY, CLOSE_TRY_LATER})
LET_GO_S: Final = 20.0
"""A connection that is replaced or refused is closed by then, also behind a slow disk."""
RIVAL_S: Final = 0.001
"""So long before the connection that replaces it comes its rival."""


@attrs.frozen(kw_only=True)
class Visit:
    """One more connection.

    Attributes:
        away_s: so long after the last one was lost.
        how: see above.
        repeats: frames that it has, and asks for again.
        lasts_s: after so long it is lost, in seconds.
        link: how it is.
    """

    away_s: float = 0.0
    how: How = "alone"
    repeats: int = 0
    lasts_s: float = float("inf")
    link: LinkPlan = attrs.Factory(LinkPlan)


class Way:
    """Used by a client as it uses a `Link`.

    Args:
        first: the connection with which the session begins.
        lasts_s: of that one.
        visits: the connections after it.
        come_back: opens one.
        watch: runs a task beside the client.
        report: told of what the server may not do.

    Attributes:
        recording_id: of the session; empty for one that cannot be resumed.
        heard: its frames by their numbers, without repeats.
    """

    def __init__(
        self,
        first: Link,
        *,
        lasts_s: float,
        visits: Iterable[Visit],
        come_back: Callable[[LinkPlan, str, ResumeRequest], Link],
        watch: Callable[[Callable[[], Any]], None],
        report: Callable[[str], None],
    ) -> None:
        self._link, self._come_back_to, self._watch = first, come_back, watch
        self._report = report
        self._visits = deque(visits)
        self._lost_s = anyio.current_time() + lasts_s
        self._said: list[str | bytes | None] = []
        self._is_first, self._is_greeted, self._is_gone, self._is_over = True, False, False, False
        self._token, self._before, self._old = "", "", list[str]()
        self._asked, self._next, self._acked, self._greeting_ack = -1, 0, 0, 0
        self.recording_id = ""
        self.heard: list[str] = []

    # -- as a link ------------------------------------------------------------------------------

    def say(self, *frames: str | bytes | None) -> None:
        """Say it now, or when the client is back."""
        self._said.extend(frames)
        if self._is_first or self._is_greeted:
            self._link.say(*frames)

    def leave(self) -> None:
        """Close for good."""
        self._is_gone = True
        self._link.leave(CLOSE_NORMAL)

    def half_close(self) -> None:
        """Say no more, and do not come back."""
        self._is_gone = True
        self._link.half_close()

    def reset(self) -> None:
        """Be gone at once, and do not come back."""
        self._is_gone = True
        self._link.reset()

    async def until_let_go(self) -> None:
        """Wait until the server has let the last connection go."""
        await self._link.until_let_go()

    @property
    def is_over(self) -> bool:
        """The client hears no more."""
        return self._is_gone or self._is_over

    @property
    def closed(self) -> tuple[int, str] | None:
        """How the server closed the last connection."""
        return self._link.closed

    @property
    def is_whole(self) -> bool:
        """Whether the client heard the end of its session."""
        closed = self._link.closed
        return not self._is_gone and closed is not None and closed[0] == CLOSE_NORMAL

    async def hear(self) -> str | None:
        """Wait for a frame that the client has not heard; None at the end."""
        while True:
            frame = None
            with anyio.CancelScope(deadline=self._lost_s):
                frame = await self._link.hear()
            if frame is None:
                if await self._come_back():
                    continue
                self._is_over = True
                return None
            taken = self._take(frame)
            if taken is not None:
                return taken

    # -- the numbers ----------------------------------------------------------------------------

    def _take(self, frame: str) -> str | None:
        body = json.loads(frame)
        kind, seq = body["type"], body.get("seq")
        if kind == "session.resumable" and seq is None:
            self._greet(body)
            return None
        if kind == "session.replaced":
            self._report("it was replaced, and had not come twice")
            return None
        if seq is None:
            if self._is_greeted or not self._is_first:
                self._report(f"resume: {frame[:80]} has no number")
            return frame
        if seq != self._next or not self._is_greeted:
            self._report(f"resume: frame {seq} in place of {self._next}")
        self._next = seq + 1
        if body["ack"] > len(self._said):
            self._report(f"resume: {body['ack']} messages of {len(self._said)} have come")
        self._acked = max(self._acked, body["ack"])
        if self._acked > self._greeting_ack and self._before:
            self._old.append(self._before)  # the server has a message of this connection
            self._before = ""
        if seq < len(self.heard):
            if self.heard[seq] != frame:
                self._report(f"resume: frame {seq} is another one now: {frame[:80]}")
            return None
        self.heard.append(frame)
        if kind == "session.resumable":
            self._token = ""
            return None
        return frame

    def _greet(self, body: dict[str, Any]) -> None:
        if self._is_greeted or body["recording_id"] != (self.recording_id or body["recording_id"]):
            self._report(f"resume: a greeting out of place: {body}")
        if body["next_seq"] != self._asked + 1:
            self._report(f"resume: {body['next_seq']} comes next, not {self._asked + 1}")
        if not self._acked <= body["ack"] <= len(self._said):
            self._report(f"resume: it says that {body['ack']} of {len(self._said)} have come")
        self.recording_id = body["recording_id"]
        if body["token"] != self._token:
            self._before, self._token = self._token, body["token"]
        self._is_greeted, self._next = True, body["next_seq"]
        self._acked = self._greeting_ack = body["ack"]
        if not self._is_first:
            self._link.say(*self._said[self._acked :])

    # -- coming back ----------------------------------------------------------------------------

    async def _come_back(self) -> bool:
        """Come back as the next visit says; False: there is none, or no right to it."""
        before = self._link
        is_final = before.closed is not None and before.closed[0] in FINAL
        if self._is_gone or is_final or not (self._token and self._visits):
            before.reset()
            return False
        visit = self._visits.popleft()
        if visit.how != "takeover" or before.is_over:
            before.reset()
            await anyio.sleep(visit.away_s)
        if visit.how == "wrong":
            await self._be_refused("x" * len(self._token))
        elif visit.how == "old" and self._old:
            await self._be_refused(self._old[0])
        if self._is_gone:
            return False
        if visit.how == "twice":
            before = self._open(LinkPlan(), self._token, len(self.heard) - 1)
            await anyio.sleep(RIVAL_S)
        self._asked = max(-1, len(self.heard) - 1 - visit.repeats)
        self._is_first = self._is_greeted = False
        self._link = self._open(visit.link, self._token, self._asked)
        self._lost_s = anyio.current_time() + visit.lasts_s
        self._watch(lambda: self._be_replaced(before))
        return True

    def _open(self, plan: LinkPlan, token: str, last_seq: int) -> Link:
        return self._come_back_to(
            plan, self.recording_id, ResumeRequest(token=token, last_seq=last_seq)
        )

    async def _be_refused(self, token: str) -> None:
        """Try a token that is not right."""
        link = self._open(LinkPlan(), token, -1)
        with anyio.move_on_after(LET_GO_S):
            frame = await link.hear()
            if frame is not None or link.closed is None or link.closed[0] != CLOSE_POLICY:
                self._report(f"resume: {token} let it in: {str(frame)[:80]}, {link.closed}")
        link.reset()

    async def _be_replaced(self, link: Link) -> None:
        """See that a connection that is replaced is let go, and hears nothing after that."""
        was_replaced = False
        with anyio.move_on_after(LET_GO_S) as scope:
            while (frame := await link.hear()) is not None:
                if was_replaced:
                    self._report(f"resume: {frame[:80]} after session.replaced")
                was_replaced = json.loads(frame)["type"] == "session.replaced"
        if scope.cancelled_caught:
            self._report("resume: a connection was not replaced by the one after it")
        link.reset()
