"""The media decodes of one session: `DecodeMedia` -> `MediaDecoded` | `MediaRejected`.

A cancelled one posts nothing. Small pictures are checked at once, in the event loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import anyio
import attrs
from anyio.abc import TaskGroup

from protocol.values import effects as ef
from protocol.values import events as ev

from ..media.decoder import Client, decode_at_once
from ..media.values import Decoded, MediaError
from .calls import Inbox

DECODE_BYTES_MAX: Final = 16 * 1024 * 1024
"""Video frames in the decoder, one append's worth; above it the reader pauses."""

DecodeMedia = Callable[[ef.DecodeMedia, Client], Awaitable[Decoded]]
"""Decodes a client's media, or raises `MediaError`."""


@attrs.define(eq=False, kw_only=True)
class Decodes:
    """Has the media of one session decoded off the event loop by `decode`.

    `client` is the session, as the decoder knows it; `on_done` is called when a decode has ended.
    """

    _decode: DecodeMedia
    _client: Client
    _inbox: Inbox
    _on_done: Callable[[], None]
    _scopes: dict[int, anyio.CancelScope] = attrs.field(factory=dict, init=False)
    _bytes: int = attrs.field(default=0, init=False)

    @property
    def is_behind(self) -> bool:
        """Whether the reader must pause until decodes end."""
        return self._bytes > DECODE_BYTES_MAX

    def start(self, effect: ef.DecodeMedia, tasks: TaskGroup) -> None:
        """Decode media in a task; never blocks."""
        try:
            made = decode_at_once(effect)
        except MediaError as error:
            self._reject(effect, error)
            return
        if made is not None:
            self._take(effect, made)
            return
        scope = self._scopes[effect.media] = anyio.CancelScope()
        # A turn's media does not pause the reader: during a turn only a close can follow.
        held_bytes = len(effect.data) if self._client.is_live else 0
        self._bytes += held_bytes
        tasks.start_soon(self._run, effect, scope, held_bytes)

    def cancel(self, media: int) -> None:
        """Cancel a decode unless it is done; nothing is posted for it."""
        scope = self._scopes.pop(media, None)
        if scope is not None:  # else it is decoded, and its event waits in the inbox
            scope.cancel()

    def cancel_all(self) -> None:
        """Cancel all decodes: the session is over, and other sessions wait for the decoder."""
        for scope in self._scopes.values():
            scope.cancel()

    async def _run(self, effect: ef.DecodeMedia, scope: anyio.CancelScope, held_bytes: int) -> None:
        try:
            with scope:
                made = await self._decode(effect, self._client)
                if not scope.cancel_called:
                    self._take(effect, made)
        except MediaError as error:
            if not scope.cancel_called:
                self._reject(effect, error)
        finally:
            self._scopes.pop(effect.media, None)
            self._bytes -= held_bytes
            self._on_done()

    def _take(self, effect: ef.DecodeMedia, made: Decoded) -> None:
        self._inbox.bring(
            ev.MediaDecoded(
                at_ns=self._inbox.now_ns(),
                media=effect.media,
                pcm=made.pcm,
                pictures=made.pictures,
                stacked=made.stacked,
            )
        )

    def _reject(self, effect: ef.DecodeMedia, error: MediaError) -> None:
        reason = str(error)
        self._inbox.post(
            ev.MediaRejected(at_ns=self._inbox.now_ns(), media=effect.media, reason=reason)
        )
