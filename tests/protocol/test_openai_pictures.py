"""Pictures of items of `openai`: which are taken, and what the model sees of them."""

from __future__ import annotations

import json
from typing import Any, Final

import numpy as np
import pytest
import simplejpeg
from hypothesis import example, given
from hypothesis import strategies as st

from protocol.values.errors import FieldError
from protocol.values.limits import FRAME_JPEG_BYTES_MAX, FRAME_PIXELS_MAX
from protocol.values.openai import CreateItem
from protocol.values.requests import Request
from protocol.wire.codec import IMAGE_URL_HEADS, Context
from protocol.wire.dialects import OPENAI
from protocol.wire.media import check_image, image_kind
from runtime.media.image import decode_image
from tests.media.webps import ANIMATED, LOSSY
from tests.protocol.test_openai_items import QUIET, Client
from tests.sessions.in_memory import base64
from tests.strategies.messages import png_header
from tests.transcripts.media import jpeg, png

PICTURES: Final = {"JPEG": jpeg(64, 48), "PNG": png(64, 48), "WebP": LOSSY}
HEADS: Final = {str(kind): head for kind, head in IMAGE_URL_HEADS.items()}


def item_of(*urls: str) -> dict[str, Any]:
    """An item with pictures."""
    content = [{"type": "input_image", "image_url": url} for url in urls]
    return {"type": "message", "role": "user", "content": content}


def read(url: str) -> bytes:
    """Read an item of one picture."""
    context = Context(mode="audio")
    made = OPENAI.parse(Request.CREATE_ITEM, {"item": item_of(url)}, context)
    assert isinstance(made, CreateItem)
    (picture,) = made.item.pictures
    return picture


def refusal(url: str) -> str:
    """Read a picture that is refused."""
    with pytest.raises(FieldError) as caught:
        read(url)
    assert caught.value.code == "invalid_payload"
    return caught.value.message.removeprefix("$.item.content[0].image_url: ")


def show(client: Client, *pictures: bytes) -> list[str]:
    """Show pictures in an item; returns the types of the answers."""
    urls = [HEADS[str(image_kind(data))] + base64(data) for data in pictures]
    told = client.say("conversation.item.create", item=item_of(*urls))
    return [one["type"] for one in told]


# -- what is taken --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PICTURES)
def test_a_picture_survives_the_wire(kind: str) -> None:
    """Clients could not show the screenshots that they make."""
    data = PICTURES[kind]
    assert read(HEADS[kind] + base64(data)) == data
    context = Context(mode="audio")
    message = OPENAI.parse(
        Request.CREATE_ITEM, {"item": item_of(HEADS[kind] + base64(data))}, context
    )
    (part,) = json.loads(OPENAI.encode_request(message))["item"]["content"]
    assert part["image_url"] == HEADS[kind] + base64(data)


@pytest.mark.parametrize("kind", PICTURES)
def test_a_picture_is_of_the_kind_that_its_client_names(kind: str) -> None:
    """A client would not notice that it mistakes one file for another."""
    for other in set(PICTURES) - {kind}:
        data = PICTURES[other]
        text = f"{len(data)} bytes that are not a {kind}"
        assert refusal(HEADS[kind] + base64(data)) == text


BAD: Final = {
    "a bomb": (png_header(30_000, 30_000), "a PNG of 30000 x 30000 pixels, at most 20000000"),
    "a strip": (png_header(1, 51), "a PNG of 1 x 51 pixels, at most 50 to 1 is allowed"),
    "cut": (png_header(9, 9)[:-1], "a PNG without a whole header"),
    "too long": (png_header(9, 9) + bytes(FRAME_JPEG_BYTES_MAX), "at most 4194304 are allowed"),
    "animated": (ANIMATED, "an animated WebP, only still pictures are taken"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_picture_is_refused_by_its_header(name: str) -> None:
    """A small message would make the server allocate gigabytes."""
    data, text = BAD[name]
    assert text in refusal(HEADS[str(image_kind(data))] + base64(data))


@pytest.mark.parametrize("url", ["data:image/gif;base64,AA==", "https://example.org/cat.png", ""])
def test_other_kinds_are_refused_by_name(url: str) -> None:
    """A client would wait for an answer to a picture that the server does not fetch."""
    expected = "only a JPEG, PNG or WebP is taken here: data:image/jpeg;base64,..."
    assert refusal(url) == expected


def damaged() -> st.SearchStrategy[bytes]:
    """Break a PNG: a bit flipped, bytes put in, taken out, or cut off."""
    whole = PICTURES["PNG"]
    spot, piece = st.integers(0, len(whole) - 1), st.binary(min_size=1, max_size=6)
    flipped = st.builds(
        lambda at, bit: whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :],
        spot,
        st.integers(0, 7),
    )
    put_in = st.builds(lambda at, new: whole[:at] + new + whole[at:], spot, piece)
    taken = st.builds(lambda at, new: whole[:at] + whole[at + len(new) :], spot, piece)
    cut = st.builds(lambda at: whole[:at], spot)
    # What follows a whole picture is not read.
    return (flipped | put_in | taken | cut).filter(lambda data: not data.startswith(whole))


@given(damaged())
@example(PICTURES["PNG"][:-1])
@example(PICTURES["PNG"][:-12])
def test_a_damaged_png_is_never_seen(data: bytes) -> None:
    """The model would see a picture that is grey from the damage on."""
    client = Client()
    client.hear(QUIET)
    url = HEADS["PNG"] + base64(data)
    told = client.say("conversation.item.create", item=item_of(url))
    if told[0]["type"] == "error":
        assert told[0]["error"]["code"] == "invalid_payload"
        assert not client.undecoded
    else:
        width, height = check_image("$", data)
        assert width * height <= FRAME_PIXELS_MAX
        client.decode()
        message = client.told[-1]["error"]["message"]
        assert message.startswith("a video frame was left out: the image is a")
    client.hear(QUIET)
    assert client.seen == [0, 0]


# -- what is seen ---------------------------------------------------------------------------------


def test_the_model_sees_a_jpeg_of_each() -> None:
    """It would be given files that it cannot read, or the wrong ones."""
    client = Client()
    client.hear(QUIET)
    assert show(client, *PICTURES.values()) == ["conversation.item.added", "conversation.item.done"]
    client.decode()
    client.hear(QUIET)
    assert client.frames == tuple(map(decode_image, PICTURES.values()))
    first, second, third = map(simplejpeg.decode_jpeg, client.frames)
    assert first.shape == second.shape == (48, 64, 3)
    assert third.shape == (47, 64, 3)
    assert np.abs(first.astype(int) - second).mean() < 4
    assert client.frames[0] == PICTURES["JPEG"]


def test_a_second_waits_for_its_picture() -> None:
    """The model would answer before it sees what it is asked about, or see it a second late."""
    client = Client()
    client.hear(QUIET)
    show(client, PICTURES["PNG"], PICTURES["WebP"])
    client.hear(QUIET * 2)
    assert client.seen == [0]
    client.decode()
    assert client.seen == [0, 2, 0]


def test_a_damaged_one_leaves_the_others() -> None:
    """One torn file would take the other pictures, or the second, with it."""
    client = Client()
    client.hear(QUIET)
    show(client, PICTURES["PNG"][:-9], PICTURES["PNG"], PICTURES["JPEG"])
    client.hear(QUIET)
    client.decode()
    assert client.frames == (decode_image(PICTURES["PNG"]), PICTURES["JPEG"])
    errors = [one["error"]["message"] for one in client.told if one["type"] == "error"]
    assert errors == ["a video frame was left out: the image is a damaged PNG"]


def test_an_old_client_s_jpeg_is_proven_as_before() -> None:
    """Recordings with JPEG pictures would replay otherwise."""
    client = Client()
    client.hear(QUIET)
    show(client, PICTURES["JPEG"])
    assert not client.undecoded
