"""Requests of OpenAI's HTTP API as they are read: forms and bodies, right and wrong."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.api.adapters import LocalClient
from runtime.api.completions import FORMATS, CompletionRequest
from runtime.api.transcriptions import PARTS_MAX, UploadRequest, read_form
from runtime.net.connection import WebSocketClosed
from runtime.net.http import CodedError

TYPE: Final = "multipart/form-data; boundary=--x-1"
NAMES: Final = st.text("abcdefgh_[]", min_size=1, max_size=12)


def form_of(fields: dict[str, bytes], boundary: bytes = b"--x-1") -> bytes:
    """Write a form as a client does."""
    made = b""
    for name, data in fields.items():
        head = f'Content-Disposition: form-data; name="{name}"; filename="a.wav"'.encode()
        made += (
            b"--" + boundary + b"\r\n" + head + b"\r\nContent-Type: a/b\r\n\r\n" + data + b"\r\n"
        )
    return made + b"--" + boundary + b"--\r\n"


@given(st.dictionaries(NAMES, st.binary(max_size=200), max_size=8))
def test_a_form_is_read(fields: dict[str, bytes]) -> None:
    """A file has a byte too many, or ends at the first line break."""
    if not any(b"--x-1" in data for data in fields.values()):
        assert read_form(TYPE, form_of(fields)) == fields


@given(
    st.binary(max_size=400),
    st.sampled_from(
        [
            *(TYPE, "", "text/plain", "multipart/form-data", "\0"),
            "multipart/form-data; boundary*0*=idna''%ff%ff",
        ]
    ),
)
def test_any_other_body_is_refused(body: bytes, content_type: str) -> None:
    """A body ends the request's task."""
    for data in (body, form_of({"model": b"tiny", "file": body})[: len(body)]):
        with suppress(CodedError):
            UploadRequest.of(content_type, data)


def test_a_form_is_bounded() -> None:
    """A form of a million parts takes a core."""
    many = {f"n{at}": b"" for at in range(PARTS_MAX)}
    assert len(read_form(TYPE, form_of(many))) == PARTS_MAX
    with pytest.raises(CodedError):
        read_form(TYPE, form_of({**many, "more": b""}))
    with pytest.raises(CodedError):
        read_form(TYPE, form_of(many)[:-6])


JSON: Final[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS: Final = (
    *("model", "messages", "stream", "stream_options", "modalities", "audio", "tools", "seed"),
    *("n", "stop", "store", "temperature", "response_format", "user"),
)
MESSAGE: Final[Any] = st.fixed_dictionaries(
    {
        "role": JSON,
        "content": JSON | st.lists(st.fixed_dictionaries({"type": JSON, "image_url": JSON})),
    }
)


@given(
    st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, JSON)),
    st.lists(MESSAGE, max_size=2) | JSON,
    st.sampled_from([*FORMATS, 1, [], None]),
)
def test_any_object_is_read_or_refused(body: dict[str, Any], messages: Any, form: Any) -> None:
    """A body ends the request's task."""
    spoken = {"modalities": ["audio"], "audio": {"format": form, "voice": body.get("audio")}}
    for asked in (
        body,
        {"model": "a", "messages": messages},
        {"model": "a", "messages": [], **spoken},
    ):
        with suppress(CodedError):
            CompletionRequest.of(asked)


@pytest.mark.anyio
async def test_a_slow_client_holds_its_session_only() -> None:
    """What a model says fast waits in memory, without bound; or a session outlives its client."""
    client = LocalClient(lambda *_: True)
    with anyio.move_on_after(0.05) as waiting:
        for _ in range(1_000):
            await client.send("{}")
    assert waiting.cancelled_caught
    client.ask({"type": "last"})
    client.leave()
    assert await client.receive() == '{"type":"last"}'
    with pytest.raises(WebSocketClosed):
        await client.receive()
    with pytest.raises(WebSocketClosed):
        await client.send("{}")
    await client.close(1000, "")
    client.ask({"type": "late"})
