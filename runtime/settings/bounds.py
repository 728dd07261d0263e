"""Defaults of the settings and bounds of their values, each with its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Final

DEFAULT_PORT: Final = 8006
DEVICES: Final = ("cpu", "cuda")
DTYPES: Final = ("fp32", "fp16", "bf16")
RECORDINGS: Final = Path("recordings")
"""The default folder of the logs: every session is recorded."""
QUEUE_MAX: Final = 64
"""At 90 s a session and one slot, the last of 64 waits over an hour; any more would time out."""
DETACHED_MAX: Final = 256
"""Sessions without a connection: each holds memory and an open log, and a slot for its grace."""
CHATS_MAX: Final = 256
"""Connected chats: each holds a socket, and memory during a turn."""
CONNECTIONS_MAX: Final = 4096
"""Many times the sessions of one machine, with room for status requests."""
CONNECTIONS_PER_ADDRESS_MAX: Final = 512
"""Enough for a proxy or a school at one address; one machine cannot take every place."""
CONNECTIONS_PER_ADDRESS_PER_S_MAX: Final = 200
"""A third of a core for handshakes; the places of all clients that reconnect at once."""
MESSAGES_PER_S_MAX: Final = 200
"""Sound in pieces of 20 ms is 50 a second, with a picture each 100."""
BYTES_PER_S_MAX: Final = 16 * 1024 * 1024
"""A second of sound with four large pictures is 16 MiB: the most in real time."""
HANDSHAKE_S: Final = 10
"""Enough for a bad mobile link; longer lets slow clients hold sockets."""
STALL_S: Final = 10
"""A peer that takes nothing for so long will not catch up."""
PING_S: Final = 20
"""Below the minute after which proxies and mobile networks drop an idle connection."""
PONG_WAIT_S: Final = 60
"""A client that is busy sending answers late; after a silent minute it is gone."""
DRAIN_S: Final = 30
"""The time that orchestrators give a process to end, by default."""

SECONDS_MAX: Final = 31_536_000
"""A year, against typing errors; its nanoseconds fit into 64 bits."""
DAYS_MAX: Final = 36_500
"""A century, against typing errors."""
MEGABYTES_MAX: Final = 1_000_000_000
"""A petabyte: more than one folder should hold."""
MIB: Final = 1 << 20
BUFFER_MB_MAX: Final = 1_024
"""Nine hours of sound for each session, against typing errors."""
COUNT_MAX: Final = 1_000_000
"""More sockets, chats or queue places than a process can hold."""
BYTES_PER_S_LIMIT: Final = 1 << 40
"""More than any network carries to one connection."""
