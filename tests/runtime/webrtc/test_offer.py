"""An offer is hostile text: it is answered, or refused with a reason."""

from __future__ import annotations

import asyncio
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("aiortc")

from aiortc import RTCConfiguration, RTCPeerConnection
from aiortc.rtcrtpreceiver import RTCRtpReceiver

from runtime.webrtc.call import BURST, CALL, Call, CallLoop, DatagramLimiter
from runtime.webrtc.door import Door
from runtime.webrtc.offer import OFFER_BYTES_MAX, Offer, OfferError, read_offer

PLACE: Final = "192.0.2.7"


async def _offer() -> str:
    peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    peer.addTransceiver("audio")
    peer.createDataChannel("oai-events")
    await peer.setLocalDescription(await peer.createOffer())
    text = str(peer.localDescription.sdp)
    await peer.close()
    return text


OFFER: Final = asyncio.run(_offer())


def test_an_offer_is_passed_on_without_its_candidates() -> None:
    """Whoever offers would have this host send packets to any address."""
    hostile = OFFER.replace("typ host", "typ host\r\na=candidate:2 1 udp 9 203.0.113.9 53 typ host")
    assert "203.0.113.9" in hostile
    found = read_offer(hostile.encode(), PLACE)
    assert found.has_data
    candidates = [it for it in found.sdp.splitlines() if "candidate" in it]
    assert {it.split(" ")[4] for it in candidates} == {PLACE}
    sound = found.sdp.partition("m=audio")[2].partition("m=application")[0]
    assert "PCMU" not in sound
    assert len(found.payload_types) == 1


REFUSED = {
    "nothing": "",
    "no SDP": "hello",
    "not ASCII": OFFER.replace("v=0", "v=0\r\na=\u00e9", 1),
    "too long": OFFER + "a=x\r\n" * OFFER_BYTES_MAX,
    "too many lines": OFFER + "a=x\r\n" * 600,
    "a long line": OFFER + "a=" + "x" * 2000,
    "two microphones": OFFER + OFFER[OFFER.index("m=audio") :],
    "video": OFFER + "m=video 9 UDP/TLS/RTP/SAVPF 96\r\n",
    "no sound": OFFER[: OFFER.index("m=audio")] + OFFER[OFFER.index("m=application") :],
    "a BUNDLE of others": OFFER.replace("BUNDLE 0", "BUNDLE nosuch 0"),
    "no BUNDLE": OFFER.replace("a=group:BUNDLE", "a=x:"),
    "a mid twice": OFFER.replace("a=mid:1", "a=mid:0"),
    "no fingerprint": OFFER.replace("a=fingerprint", "a=x"),
    "no Opus": OFFER.replace("opus/48000/2", "speex/16000"),
}


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_an_offer_that_cannot_be_answered_is_refused(text: str) -> None:
    """A browser waits for a connection that never comes."""
    with pytest.raises(OfferError):
        read_offer(text.encode(), PLACE)


@given(data=st.data())
def test_any_other_offer_is_read_or_refused(data: st.DataObject) -> None:
    """Text from anyone, which a library takes apart."""
    lines = OFFER.splitlines()
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(lines) - 1))
        change = data.draw(st.sampled_from(["drop", "twice", "cut", "junk"]))
        line = lines[at]
        lines[at : at + 1] = {
            "drop": [],
            "twice": [line, line],
            "cut": [line[: data.draw(st.integers(0, len(line)))]],
            "junk": [line + data.draw(st.text(max_size=20))],
        }[change]
        if not lines:
            return
    try:
        found = read_offer("\r\n".join(lines).encode("utf-8", "replace"), PLACE)
    except OfferError:
        return
    asyncio.run(_answered(found))


async def _answered(offer: Offer) -> None:
    call = Call(offer, None, None)  # type: ignore[arg-type] - it sends nothing yet
    try:
        assert await call.answer()
    except OfferError:
        return
    await call._peer.close()


def test_an_offer_without_a_direction_is_one_of_both() -> None:
    """RFC 8866 says so, and some clients leave it out."""
    found = read_offer(OFFER.replace("a=sendrecv\r\n", "").encode(), PLACE)
    assert "a=sendrecv" in found.sdp
    asyncio.run(_answered(found))


def test_a_flood_of_datagrams_is_dropped() -> None:
    """Anyone may send to a port, and the library keeps what comes before a call is connected."""
    limiter = DatagramLimiter()
    taken = sum(limiter.accepts(bytes(20)) for _ in range(10 * BURST))
    assert BURST <= taken < 2 * BURST


def test_ever_new_streams_are_dropped() -> None:
    """The library keeps each, and looks through all for every packet."""
    limiter = DatagramLimiter()
    sound = [b"\x80\x60" + bytes(6) + number.to_bytes(4, "big") for number in range(100)]
    assert [limiter.accepts(packet) for packet in sound] == [True] * 8 + [False] * 92
    assert limiter.accepts(sound[0])
    assert not limiter.accepts(b"\x80\xc8" + bytes(2) + b"new!" + bytes(4)), "a report"


def test_calls_take_ports_of_their_range() -> None:
    """A firewall lets those pass, and no others."""
    ports = range(41_200, 41_210)

    async def offer_of_a_call() -> str:
        CALL.set(DatagramLimiter())
        return await _offer()

    with asyncio.Runner(loop_factory=lambda: CallLoop(ports)) as runner:
        sdp = runner.run(offer_of_a_call())
    candidates = [it.split(" ") for it in sdp.splitlines() if it.startswith("a=candidate")]
    assert candidates
    assert {int(it[5]) for it in candidates} <= {*ports}


def test_the_address_behind_a_nat_is_told() -> None:
    """A browser elsewhere cannot reach the address that this host has."""
    shown = Door("ws://nowhere", address="198.51.100.7", calls_max=1)._shown(OFFER)
    candidates = [it.split(" ")[4] for it in shown.splitlines() if it.startswith("a=candidate")]
    assert candidates
    assert {*candidates} == {"198.51.100.7"}


def test_the_receiver_of_the_library_still_takes_packets_one_by_one() -> None:
    """Ours takes its place: it would get none."""
    assert asyncio.iscoroutinefunction(RTCRtpReceiver._handle_rtp_packet)
    names = RTCRtpReceiver._handle_rtp_packet.__code__.co_varnames
    assert names[:3] == ("self", "packet", "arrival_time_ms")
