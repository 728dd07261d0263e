"""What a course is asked for: the name of its method for each event and message of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..values import events as ev
from ..values import openai as oa
from ..values import requests as rq
from ..values.requests import ClientMessage

METHODS: Final[Mapping[type[ev.Event | ClientMessage], str]] = {
    rq.Init: "init",
    rq.Append: "append",
    rq.See: "see",
    rq.Pause: "pause",
    rq.Resume: "resume",
    rq.Interrupt: "interrupt",
    rq.Ask: "ask",
    rq.ChooseModel: "choose",
    rq.AppendSound: "append_sound",
    rq.Commit: "commit",
    rq.Mute: "mute",
    rq.Unmute: "unmute",
    rq.Update: "update",
    oa.Configure: "configure_session",
    oa.CommitSound: "commit_sound",
    oa.ClearSound: "clear_sound",
    oa.Respond: "respond",
    oa.CancelResponse: "cancel_response",
    oa.CreateItem: "create_item",
    oa.DeleteItem: "delete_item",
    oa.RetrieveItem: "retrieve_item",
    oa.TruncateItem: "truncate_item",
    ev.Forked: "forked",
    ev.MediaDecoded: "media_decoded",
    ev.MediaRejected: "media_rejected",
    ev.SpeechStarted: "speech_started",
    ev.SpeechStopped: "speech_stopped",
    ev.UserTranscribed: "user_transcribed",
    ev.BackendOpened: "backend_opened",
    ev.BackendOpenFailed: "backend_open_failed",
    ev.UnitDone: "unit_done",
    ev.UnitFailed: "unit_failed",
    ev.FinalizeDone: "finalize_done",
    ev.FinalizeFailed: "finalize_failed",
    ev.RollbackDone: "rollback_done",
    ev.RollbackFailed: "rollback_failed",
    ev.TurnPrefilled: "turn_prefilled",
    ev.TurnProgress: "turn_progressed",
    ev.TurnDone: "turn_done",
    ev.TurnFailed: "turn_failed",
    ev.ChunkDone: "chunk_done",
    ev.ChunkFailed: "chunk_failed",
    ev.LeaseRevoked: "lease_revoked",
    ev.Rebuilt: "rebuilt",
    ev.RebuildFailed: "rebuild_failed",
}
"""The course's method for each event and message of its own."""
