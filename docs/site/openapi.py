"""The addresses of a server as an OpenAPI 3.1 document, for programs: `reference/openapi.json`.

Addresses and their texts come from the tables in the docstrings of `runtime/api`, query parameters
from what the routes check, and objects from the classes that are sent. `ANSWERS` says which answer
has which body. `tests/test_site_http.py` holds it to the routes, and a server's answers to it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import attrs

from protocol.values.limits import MODES
from recorder.storage.listing import State, Summary
from recorder.storage.marks import Mark
from replay.rerun.report import EXIT_CODES
from runtime.api import recordings
from runtime.api.twilio import PARAMETERS as TWILIO
from runtime.slots.workers import WorkerStatus
from runtime.telemetry.watching import SessionStatus

from .staging import ROOT

MODULES: Final = (*("pages", "routes", "recordings", "voices", "openai", "twilio"),)
"""Modules of `runtime/api` whose docstrings have addresses."""
HEALTH: Final = {
    "GET /health": ("whether the server lives, and has a voice", "all"),
    "GET /ready": ("200, or 503 while it loads, is full or drains", "all"),
}
ROW: Final = re.compile(r"^\| `([A-Z]+ /\S*)` \| (.+?) \|(?: (.+?) \|)?$", re.MULTILINE)

Schema = dict[str, Any]
PLAIN: Final[Mapping[object, Schema]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
}


def of(type_: object) -> Schema:
    """The schema of a type: a plain one, a choice, or a class of attrs."""
    if type_ in PLAIN:
        return PLAIN[type_]
    arguments = get_args(type_)
    if get_origin(type_) is Literal:
        return {"enum": [*arguments]}
    if arguments:
        return {"anyOf": [of(each) for each in arguments]}
    if isinstance(type_, type) and issubclass(type_, Enum):
        return {"enum": [each.value for each in type_]}
    assert isinstance(type_, type), type_
    hints = get_type_hints(type_)
    return record(**{each.name: of(hints[each.name]) for each in attrs.fields(type_)})


def record(**fields: Schema) -> Schema:
    """The schema of an object with these fields, all of them there."""
    return {
        "type": "object",
        "properties": fields,
        "required": [*fields],
        "additionalProperties": False,
    }


def listed(schema: Schema) -> Schema:
    """The schema of a list."""
    return {"type": "array", "items": schema}


def named(name: str) -> Schema:
    """Refer to a schema of `SCHEMAS`."""
    return {"$ref": f"#/components/schemas/{name}"}


TEXT, WHOLE, NUMBER = PLAIN[str], PLAIN[int], PLAIN[float]
SCHEMAS: Final[Mapping[str, Schema]] = {
    "Error": {
        **record(error=TEXT, message=TEXT),
        "description": "`error` is for programs, `message` for people.",
    },
    "Recording": of(Summary),
    "Session": of(SessionStatus),
    "Worker": of(WorkerStatus),
    "Ticket": record(
        ticket_id=TEXT,
        position=WHOLE,
        estimated_wait_s=of(Union[float, None]),  # noqa: UP007 - `|` has another origin
        waited_s=NUMBER,
        mode={"enum": [*MODES]},
        owner=TEXT,
    ),
    "Model": record(id=TEXT, object={"const": "model"}, created=WHOLE, owned_by=TEXT),
    "Voice": record(name=TEXT, bytes=WHOLE),
    "Mark": record(recording_id=TEXT, seq=WHOLE, at_ms=NUMBER),
    "LaterMark": of(Mark),
    "Passage": record(voice=TEXT, at_ms=WHOLE, text=TEXT),
}

OBJECT: Final[Schema] = {"type": "object"}
REPLAY: Final[Schema] = {
    **record(result={"enum": [*EXIT_CODES]}, elapsed_ms=NUMBER, lines=listed(TEXT)),
    "additionalProperties": True,
    "description": "As `antiphon replay --json` prints it, and the lines that it prints without.",
}
DIFFERENCE: Final = record(
    first={"type": ["object", "null"]}, differences=WHOLE, compared=WHOLE, same=WHOLE
)
LOG: Final = ("application/zstd", {"200": {}, "206": {}, "304": {}, "416": {}})
PAGE: Final = ("text/html", {"200": TEXT})


def _json(schema: Schema, status: str = "200") -> tuple[str, dict[str, Schema]]:
    return "application/json", {status: schema}


ANSWERS: Final[Mapping[str, tuple[str, dict[str, Schema]]]] = {
    "GET /": PAGE,
    "GET /console": PAGE,
    "GET /web/{file}": ("*/*", {"200": {}}),
    "GET /api/console": _json(OBJECT),
    "POST /api/console": _json(record(value=TEXT, expires_at=WHOLE)),
    "POST /v1/chat/completions": _json(OBJECT),
    "POST /v1/audio/transcriptions": _json(OBJECT),
    "GET /v1/twilio": ("text/xml", {"200": TEXT}),
    "POST /v1/twilio": ("text/xml", {"200": TEXT}),
    "POST /v1/responses": _json(OBJECT, "404"),
    "POST /v1/audio/speech": _json(OBJECT, "404"),
    "POST /v1/audio/translations": _json(OBJECT, "404"),
    "POST /v1/realtime/client_secrets": _json(record(value=TEXT, expires_at=WHOLE, session=OBJECT)),
    "POST /v1/realtime/calls": ("application/sdp", {"201": TEXT}),
    "POST /v1/live/sessions": _json(record(session=OBJECT, transport=OBJECT)),
    "GET /health": _json(
        {
            **record(status={"const": "alive"}, speech={"enum": ["on", "off"]}),
            "required": ["status"],
        }
    ),
    "GET /ready": (
        "application/json",
        {
            "200": record(status={"const": "ready"}),
            "503": record(status={"enum": ["loading", "full", "draining"]}),
        },
    ),
    "GET /status": _json(OBJECT),
    "GET /metrics": ("text/plain", {"200": TEXT}),
    "GET /api/queue": _json(
        record(
            queue_length=WHOLE,
            tickets=listed(named("Ticket")),
            items=listed({"type": "object"}),
            running_tasks=listed({"type": "object"}),
        )
    ),
    "GET /api/queue/{ticket_id}": _json(named("Ticket")),
    "DELETE /api/queue/{ticket_id}": ("", {"204": {}}),
    "POST /api/streaming/stop": _json(record(success={"type": "boolean"}, message=TEXT)),
    "GET /api/sessions": _json(record(sessions=listed(named("Session")))),
    "GET /api/sessions/{recording_id}": _json(named("Session")),
    "GET /v1/models": _json(record(object={"const": "list"}, data=listed(named("Model")))),
    "GET /v1/models/{name}": _json(named("Model")),
    "GET /api/recordings": _json(
        record(recordings=listed(named("Recording")), next={"type": ["string", "null"]})
    ),
    "GET /api/recordings/{recording_id}": _json(named("Recording")),
    "DELETE /api/recordings/{recording_id}": ("", {"204": {}}),
    "GET /api/recordings/{recording_id}/log": LOG,
    "GET /api/recordings/{recording_id}/live": ("application/x-ndjson", {"200": TEXT}),
    "GET /api/recordings/{recording_id}/view": ("text/html", {"200": TEXT, "303": {}}),
    "GET /api/recordings/{recording_id}/digest": _json(
        {"anyOf": [record(said=listed(named("Passage")), measures=OBJECT), DIFFERENCE]}
    ),
    "GET /api/recordings/{recording_id}/replay": _json(REPLAY),
    "GET /api/recordings/{recording_id}/redacted": LOG,
    "GET /api/sessions/{recording_id}/recording": LOG,
    "GET /api/sessions/{recording_id}/view": ("text/html", {"200": TEXT, "303": {}}),
    "GET /v1/live/sessions/{recording_id}/content": ("audio/wav", LOG[1]),
    "POST /api/sessions/{recording_id}/marks": _json(named("Mark"), "201"),
    "GET /api/recordings/{recording_id}/marks": _json(
        record(marks=listed(named("LaterMark")), damaged=WHOLE)
    ),
    "POST /api/recordings/{recording_id}/marks": _json(named("LaterMark"), "201"),
    "DELETE /api/recordings/{recording_id}/marks/{number}": ("", {"204": {}}),
    "GET /api/voices": _json(
        record(voices=listed(named("Voice")), default={"type": ["string", "null"]})
    ),
    "PUT /api/voices/{name}": ("application/json", {"200": named("Voice"), "201": named("Voice")}),
    "DELETE /api/voices/{name}": ("", {"204": {}}),
    "GET /api/default_ref_audio": _json(
        record(name=TEXT, duration=NUMBER, sample_rate=WHOLE, samples=WHOLE, base64=TEXT)
    ),
    "GET /api/workers": _json(record(workers=listed(named("Worker")))),
    "POST /api/workers": _json(named("Worker"), "201"),
    "POST /api/workers/{number}/drain": _json(named("Worker"), "202"),
    "POST /api/drain": _json(record(sessions=WHOLE), "202"),
}
"""By request: the media type of the body, and a schema for each status; an empty one: no JSON."""
BODIES: Final[Mapping[str, tuple[str, Schema]]] = {
    "POST /api/sessions/{recording_id}/marks": ("application/json", record(text=TEXT)),
    "POST /api/recordings/{recording_id}/marks": (
        "application/json",
        record(at_ms=WHOLE, end_ms=WHOLE, text=TEXT),
    ),
    "POST /api/workers": ("application/json", record(address=TEXT)),
    "POST /v1/chat/completions": (
        "application/json",
        record(model=TEXT, messages=listed(OBJECT)) | {"additionalProperties": True},
    ),
    "POST /v1/audio/transcriptions": (
        "multipart/form-data",
        record(model=TEXT, file={}) | {"additionalProperties": True},
    ),
    "POST /v1/realtime/client_secrets": (
        "application/json",
        record(expires_after=OBJECT, session=OBJECT) | {"required": []},
    ),
    "POST /v1/realtime/calls": ("application/sdp", TEXT),
    "POST /v1/live/sessions": ("application/json", record(session=OBJECT, transport=OBJECT)),
    "PUT /api/voices/{name}": ("audio/wav", {}),
}
_VIEWED: Final = recordings.VIEW_PARAMETERS
QUERIES: Final[Mapping[str, tuple[str, ...]]] = {
    "GET /api/recordings": recordings.PARAMETERS,
    "GET /api/recordings/{recording_id}/digest": recordings.DIGEST_PARAMETERS,
    "GET /api/recordings/{recording_id}/live": recordings.LIVE_PARAMETERS,
    "GET /api/recordings/{recording_id}/view": _VIEWED,
    "GET /api/recordings/{recording_id}/redacted": recordings.REDACTED_PARAMETERS,
    "GET /api/sessions/{recording_id}/view": _VIEWED,
    "GET /v1/twilio": TWILIO,
    "POST /v1/twilio": TWILIO,
    "PUT /api/voices/{name}": ("replace",),
    "POST /v1/realtime/calls": ("model",),
}
LIMITED: Final[Mapping[str, Schema]] = {
    "mode": {"enum": [*MODES]},
    "state": {"enum": [*get_args(State)]},
    "to": {"enum": [*recordings.DIRECTIONS]},
    "as": {"enum": ["log", "page"]},
    "blobs": {"enum": [0, 1]},
    "replace": {"enum": [0, 1]},
    "limit": {"type": "integer", "minimum": 1, "maximum": recordings.LIMIT_MAX},
    "since_ms": {"type": "integer", "minimum": 0, "maximum": recordings.NUMBER_MAX},
    "from_seq": {"type": "integer", "minimum": 0, "maximum": recordings.NUMBER_MAX},
}
"""Query parameters that are not any text."""


def requests() -> Iterator[tuple[str, str, str]]:
    """Find all requests, such as `GET /health`; what each is, and for whom."""
    for request, (text, whom) in HEALTH.items():
        yield request, text, whom
    for name in MODULES:
        module = ast.parse((ROOT / "runtime" / "api" / f"{name}.py").read_text("utf-8"))
        table = ast.get_docstring(module) or ""
        for request, text, whom in ROW.findall(table):
            yield request.replace("/...", "/{file}"), text, whom


def openapi(version: str) -> Schema:
    """The document."""
    paths: dict[str, Schema] = {}
    for request, text, whom in requests():
        method, path = request.split(" ")
        paths.setdefault(path, {})[method.lower()] = _operation(request, text, whom)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Antiphon",
            "version": version,
            "description": "Sessions are WebSockets: `antiphon dev schema` describes them.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "http://127.0.0.1:8006"}],
        "security": [{}, {"bearer": []}, {"basic": []}],
        "paths": paths,
        "components": {
            "schemas": dict(SCHEMAS),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "basic": {"type": "http", "scheme": "basic", "description": "Any name; the key."},
            },
        },
    }


def _operation(request: str, text: str, whom: str) -> Schema:
    media, statuses = ANSWERS[request]
    found: Schema = {
        "summary": text,
        "operationId": "_".join(re.findall(r"\w+", request)).lower(),
        "parameters": [*_parameters(request)],
        "responses": {code: _answer(media, code, schema) for code, schema in statuses.items()},
    }
    found["responses"]["default"] = _answer("application/json", "default", named("Error"))
    if whom == "all":
        found["security"] = []
    elif whom not in {"", "as above"}:
        found["description"] = f"For {whom}."
    if request in BODIES:
        media, schema = BODIES[request]
        found["requestBody"] = {"required": True, "content": {media: {"schema": schema}}}
    return found


def _parameters(request: str) -> Iterator[Schema]:
    for name in re.findall(r"\{(\w+)\}", request):
        yield {"name": name, "in": "path", "required": True, "schema": TEXT}
    for name in QUERIES.get(request, ()):
        yield {"name": name, "in": "query", "schema": LIMITED.get(name, TEXT)}


def _answer(media: str, code: str, schema: Schema) -> Schema:
    is_empty = code in {"204", "303", "304", "416"}
    body = {} if is_empty else {"content": {media: {"schema": schema}}}
    return {"description": "an error" if code == "default" else MEANING[code], **body}


MEANING: Final[Mapping[str, str]] = {
    "200": "as asked",
    "201": "made",
    "202": "begun",
    "204": "removed",
    "206": "the range that was asked for",
    "303": "another session: its address",
    "404": "it is not served",
    "304": "it has not changed",
    "416": "there is no such range",
    "503": "no new session is taken",
}
