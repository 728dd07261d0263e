"""What the pages of MiniCPM-o's demo ask a server for, besides what every server has (`--static`).

| path | is | for |
|---|---|---|
| `GET /workers` | the slots, each as one of the demo's workers | `admin` |
| `GET /sessions` | the running sessions | each key its own, `admin` all |
| `GET /api/apps` | the pages that work here, for the menu | each key |
| `GET /api/admin/apps` | the same for the page of operators | `admin` |
| `GET /api/presets` | prompts to choose from: none, so the pages show no choice | each key |
| `GET /api/frontend_defaults` | settings of pages: none, so they have their own | each key |
| `GET /api/assets/ref_audio` | the library of voices | each key |
| `GET /api/config/eta` | times by which the demo estimates a wait; here it is measured | `admin` |

Only reading is offered: what these pages change is changed by a server's settings, `/api/voices`
and `/api/queue`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from ..access.gate import require_admin
from ..access.middleware import principal_of
from ..media.voices import VoiceLibrary
from ..net.http import json_response
from ..session.server import Server
from .requests import in_thread

APPS: Final = (
    ("turnbased", "/turnbased", "Turn-based Chat"),
    ("half_duplex_audio", "/half_duplex", "Half-Duplex Audio"),
    ("omni", "/omni", "Omni Full-Duplex"),
    ("audio_duplex", "/audio_duplex", "Audio Full-Duplex"),
)
"""The pages; one that is not listed leads to the start page."""
ETA_S: Final = {f"eta_{name}_s": 0 for name in ("chat", "streaming", "half_duplex")} | {
    f"eta_{name}_duplex_s": 0 for name in ("audio", "omni")
}
Answer = Callable[[Request], Awaitable[Response]]


def queue_of(tickets: Sequence[Mapping[str, Any]], now: datetime) -> list[dict[str, Any]]:
    """The waiting tickets as the page of operators reads them."""
    return [
        {
            "ticket_id": it["ticket_id"],
            "position": it["position"],
            "request_type": it["mode"],
            "session_id": None,
            "estimated_wait_s": it["estimated_wait_s"],
            "wait_elapsed_s": it["waited_s"],
            "enqueued_at": (now - timedelta(seconds=it["waited_s"])).isoformat(),
        }
        for it in tickets
    ]


class DemoPages:
    """The answers for these pages; `server` returns None while the model loads."""

    def __init__(self, server: Callable[[], Server | None], voices: VoiceLibrary | None) -> None:
        self._server = server
        self._voices = voices

    def answers(self) -> Mapping[str, Answer]:
        """The answers by their paths; a file of the folder comes before its path's."""
        apps = [{"app_id": it, "name": name, "route": route} for it, route, name in APPS]
        return {
            "/workers": self._list_workers,
            "/sessions": self._list_sessions,
            "/api/assets/ref_audio": self._list_voices,
            "/api/apps": _always({"apps": apps}),
            "/api/admin/apps": _always({"apps": [it | {"enabled": True} for it in apps]}, "admin"),
            "/api/presets": _always({}),
            "/api/frontend_defaults": _always({}),
            "/api/config/eta": _always({"config": ETA_S, "ema_alpha": 0}, "admin"),
        }

    async def _list_workers(self, request: Request) -> Response:
        require_admin(principal_of(request))
        server = self._server()
        roster = () if server is None else server.workers.roster()
        workers = [
            {
                "worker_id": f"{it.number}.{slot}",
                "host": it.where,
                "port": 0,
                "gpu_id": 0,
                "status": "idle"
                if slot < it.free
                else "busy"
                if it.state == "serving"
                else it.state,
                "current_session_id": None,
                "total_requests": 0,
            }
            for it in roster
            for slot in range(it.slots)
        ]
        return json_response({"total": len(workers), "workers": workers})

    async def _list_sessions(self, request: Request) -> Response:
        principal, server = principal_of(request), self._server()
        now = datetime.now(UTC)
        sessions = [
            {
                "session_id": it.session_id,
                "worker_id": it.mode,
                "messages_hash": it.recording_id,
                "last_active": now.isoformat(),
            }
            for it in (() if server is None else server.roster(lambda _: 0))
            if principal.may_see(it.owner)
        ]
        return json_response({"total": len(sessions), "sessions": sessions})

    async def _list_voices(self, _request: Request) -> Response:
        sizes = {} if self._voices is None else await in_thread(self._voices.sizes)
        epoch = datetime.fromtimestamp(0, UTC).isoformat()
        voices = [
            {"id": it, "name": it, "source_type": "voice", "duration_ms": None, "created_at": epoch}
            for it in sorted(sizes)
        ]
        return json_response({"total": len(voices), "ref_audios": voices})


def _always(body: dict[str, Any], scope: str = "") -> Answer:
    async def answer(request: Request) -> Response:
        if scope:
            require_admin(principal_of(request))
        return json_response(body)

    return answer
