"""The fixed limits of connections; an operator's are in `Settings`."""

from __future__ import annotations

from typing import Final

RECEIVING_BYTES_MAX: Final = 256 * 1024 * 1024
"""Messages on their way in, over all connections: two or three of the largest, or a dozen videos
from phones. Until it is decoded a message costs three times this."""
LARGE_MESSAGE_BYTES: Final = 1024 * 1024
"""A second of sound with pictures is less, and must arrive within seconds."""
UNCOUNTED_BYTES: Final = 16 * 1024
"""Of a message in progress: 64 MiB for the most connections."""
