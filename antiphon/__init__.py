"""Antiphon's public names: the client, streaming input, and recordings. `import antiphon`.

    url = "ws://127.0.0.1:8006"
    async with antiphon.connect(url, mode="audio", instructions="Be brief.") as session:
        await session.append(pcm)              # any amount of float32, 16 kHz mono
        async for event in session:
            if isinstance(event, antiphon.Speech):
                play(event.samples)            # float32, 24 kHz mono

    async with antiphon.connect(url, mode="chat") as session:
        async for piece in await session.ask("Good morning!"):
            print(piece.text if isinstance(piece, antiphon.Delta) else "", end="", flush=True)

    async with antiphon.transcribe(url, model="tiny") as session:
        await session.append(pcm)
        await session.finish()                 # the utterance ends
        async for event in session:
            if isinstance(event, antiphon.TranscriptDone):
                break                          # the session would wait for the next one
            print(event.text if isinstance(event, antiphon.TranscriptDelta) else "", end="")

The client runs on asyncio and on trio. One task sends and one receives. Every error is an
`antiphon.ClientError`.

    with antiphon.LogReader(path) as log:      # a pathlib.Path, or the bytes of a log
        told = antiphon.inspect_log(log.head.fields, log)
    with antiphon.LogReader(path) as log:
        report = antiphon.replay_log(log)      # without the model
    print(told.end.reason, report.divergence)

Every error of a log is an `antiphon.RecorderError`.

It only re-exports from the four packages, under the name that users install, and loads each part
when it is first used. Streaming input and models need the extra `server`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from protocol.values.errors import ErrorCode, ProtocolError
    from protocol.values.messages import (
        Closed,
        Created,
        Delta,
        ErrorReport,
        GoingAway,
        Interrupted,
        Listen,
        Metrics,
        Paused,
        Prefilled,
        QueuePlace,
        Response,
        Resumed,
        Speech,
        ToolCalled,
        TranscriptDelta,
        TranscriptDone,
    )
    from protocol.values.model import ChatConfig, DuplexConfig, Tool, ToolCall, ToolResult
    from protocol.values.requests import (
        Append,
        AudioPart,
        ChatMessage,
        ImagePart,
        Init,
        ReferenceAudio,
        SpeechRequest,
        TextPart,
        VideoPart,
        VoiceName,
    )
    from recorder.format.format import LogDamaged, Record, RecorderError, Unreadable
    from recorder.read.reader import LogReader
    from recorder.read.reader import read as read_log
    from recorder.read.scan import Damage
    from recorder.repair import Report as VerifyReport
    from recorder.repair import verify as verify_log
    from replay.diff import DiffReport
    from replay.diff import compare as compare_logs
    from replay.eval.evaluate import measure_log
    from replay.export.formats import export as export_log
    from replay.rerun.logic import replay as replay_log
    from replay.rerun.report import ReplayReport
    from replay.story.inspect import Inspection
    from replay.story.inspect import inspect as inspect_log
    from runtime.client.chat import Answer, ChatSession, called, message, returned, tool
    from runtime.client.duplex import DuplexSession, Event, TranscriptEvent, TranscriptionSession
    from runtime.client.errors import (
        AddressError,
        CannotConnectError,
        ClientError,
        HandshakeRejectedError,
        LocalProtocolError,
        RemoteProtocolError,
        ReportedError,
        SessionClosedError,
        SessionRefusedError,
    )
    from runtime.client.mcp import tools_from_mcp
    from runtime.client.resuming import Reconnected, Reconnecting
    from runtime.client.sdk import connect, transcribe
    from runtime.client.session import ClientSession
    from runtime.client.session import connect as connect_raw
    from runtime.model.models import load_backend, load_backend_async
    from runtime.streaming import SamplingParams, Streaming, StreamingInput, StreamingOutput

    __version__: str

_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "protocol.values.errors": "ErrorCode ProtocolError",
        "protocol.values.messages": (
            "Closed Created Delta ErrorReport GoingAway Interrupted Listen Metrics Paused "
            "Prefilled QueuePlace Response Resumed Speech ToolCalled TranscriptDelta TranscriptDone"
        ),
        "protocol.values.model": "ChatConfig DuplexConfig Tool ToolCall ToolResult",
        "protocol.values.requests": (
            "Append AudioPart ChatMessage ImagePart Init ReferenceAudio SpeechRequest TextPart "
            "VideoPart VoiceName"
        ),
        "recorder.format.format": "LogDamaged Record RecorderError Unreadable",
        "recorder.read.reader": "LogReader read:read_log",
        "recorder.read.scan": "Damage",
        "recorder.repair": "Report:VerifyReport verify:verify_log",
        "replay.diff": "DiffReport compare:compare_logs",
        "replay.eval.evaluate": "measure_log",
        "replay.export.formats": "export:export_log",
        "replay.rerun.logic": "replay:replay_log",
        "replay.rerun.report": "ReplayReport",
        "replay.story.inspect": "Inspection inspect:inspect_log",
        "runtime.client.chat": "Answer ChatSession called message returned tool",
        "runtime.client.duplex": "DuplexSession Event TranscriptEvent TranscriptionSession",
        "runtime.client.errors": (
            "AddressError CannotConnectError ClientError HandshakeRejectedError LocalProtocolError "
            "RemoteProtocolError ReportedError SessionClosedError SessionRefusedError"
        ),
        "runtime.client.mcp": "tools_from_mcp",
        "runtime.client.resuming": "Reconnected Reconnecting",
        "runtime.client.sdk": "connect transcribe",
        "runtime.client.session": "ClientSession connect:connect_raw",
        "runtime.model.models": "load_backend load_backend_async",
        "runtime.streaming": "SamplingParams Streaming StreamingInput StreamingOutput",
    }
)
"""The public names by their module, as the imports above have them; `name:public_name`."""
_PLACES: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        pair.rpartition(":")[2]: (module, pair.partition(":")[0])
        for module, names in _NAMES.items()
        for pair in names.split()
    }
)

__all__ = [
    "AddressError",
    "Answer",
    "Append",
    "AudioPart",
    "CannotConnectError",
    "ChatConfig",
    "ChatMessage",
    "ChatSession",
    "ClientError",
    "ClientSession",
    "Closed",
    "Created",
    "Damage",
    "Delta",
    "DiffReport",
    "DuplexConfig",
    "DuplexSession",
    "ErrorCode",
    "ErrorReport",
    "Event",
    "GoingAway",
    "HandshakeRejectedError",
    "ImagePart",
    "Init",
    "Inspection",
    "Interrupted",
    "Listen",
    "LocalProtocolError",
    "LogDamaged",
    "LogReader",
    "Metrics",
    "Paused",
    "Prefilled",
    "ProtocolError",
    "QueuePlace",
    "Reconnected",
    "Reconnecting",
    "Record",
    "RecorderError",
    "ReferenceAudio",
    "RemoteProtocolError",
    "ReplayReport",
    "ReportedError",
    "Response",
    "Resumed",
    "SamplingParams",
    "SessionClosedError",
    "SessionRefusedError",
    "Speech",
    "SpeechRequest",
    "Streaming",
    "StreamingInput",
    "StreamingOutput",
    "TextPart",
    "Tool",
    "ToolCall",
    "ToolCalled",
    "ToolResult",
    "TranscriptDelta",
    "TranscriptDone",
    "TranscriptEvent",
    "TranscriptionSession",
    "Unreadable",
    "VerifyReport",
    "VideoPart",
    "VoiceName",
    "__version__",
    "called",
    "compare_logs",
    "connect",
    "connect_raw",
    "export_log",
    "inspect_log",
    "load_backend",
    "load_backend_async",
    "measure_log",
    "message",
    "read_log",
    "replay_log",
    "returned",
    "tool",
    "tools_from_mcp",
    "transcribe",
    "verify_log",
]


def __getattr__(name: str) -> Any:
    """Load a public name (PEP 562); `ImportError`: it needs an extra that is not installed."""
    if name == "__version__":
        from importlib.metadata import version

        found: Any = version("antiphon")
    elif name in _PLACES:
        module, attribute = _PLACES[name]
        found = getattr(_loaded(module, name), attribute)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def _loaded(module: str, name: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        from runtime.settings.extras import what_is_missing

        missing = what_is_missing(error)
        if missing is None:
            raise
        raise ImportError(f"antiphon.{name} {missing}") from error


def __dir__() -> list[str]:
    return list(__all__)
