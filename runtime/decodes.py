"""The media of one session that is being decoded: what was asked for, until its event is posted.

Each `DecodeMedia` is answered by one `MediaDecoded` or `MediaRejected`, unless it is cancelled.
Small pictures are proven at once, in the event loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import anyio
from anyio.abc import TaskGroup

from protocol import effects as ef
from protocol import events as ev

from .calls import Inbox
from .media.decoder import decode_at_once
from .media.fair import Client
from .media.values import Decoded, MediaError

DECODE_BYTES_MAX: Final = 16 * 1024 * 1024
"""Frames of video handed to the decoder and not back yet: one append's worth; then the reader
pauses."""

DecodeMedia = Callable[[ef.DecodeMedia, Client], Awaitable[Decoded]]
"""Decodes media of a client, or raises `MediaError`."""


class Decodes:
    """Has the media of one session decoded.

    Args:
        decode: `MediaDecoder.decode`, off the event loop.
        client: the session, to the decoder.
        inbox: the session's.
        on_done: told when some media holds nothing any more.
    """

    def __init__(
        self,
        decode: DecodeMedia,
        client: Client,
        *,
        inbox: Inbox,
        on_done: Callable[[], None],
    ) -> None:
        self._decode = decode
        self._client: Final = client
        self._inbox = inbox
        self._on_done = on_done
        self._scopes: dict[int, anyio.CancelScope] = {}
        self._bytes = 0

    @property
    def is_behind(self) -> bool:
        """So much is being decoded that the reader must pause."""
        return self._bytes > DECODE_BYTES_MAX

    def start(self, effect: ef.DecodeMedia, tasks: TaskGroup) -> None:
        """Have media decoded; never blocks.

        Args:
            effect: what is to be decoded.
            tasks: where it is waited for.
        """
        try:
            made = decode_at_once(effect)
        except MediaError as error:
            self._reject(effect, error)
            return
        if made is not None:
            self._take(effect, made)
            return
        scope = self._scopes[effect.media] = anyio.CancelScope()
        # A turn's media holds no reader up: amid a turn there is nothing more to come but a close.
        held_bytes = len(effect.data) if self._client.is_live else 0
        self._bytes += held_bytes
        tasks.start_soon(self._run, effect, scope, held_bytes)

    def cancel(self, media: int) -> None:
        """Decode it no more, unless that has begun; nothing is posted of it."""
        scope = self._scopes.pop(media, None)
        if scope is not None:  # else it is decoded, and what came of it waits in the inbox
            scope.cancel()

    def cancel_all(self) -> None:
        """Decode nothing more: the session is over, and others wait for their turn."""
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
        self._inbox.post(
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
