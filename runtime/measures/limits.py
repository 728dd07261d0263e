"""The fixed numbers in the definitions of the measures: they are printed with them."""

from __future__ import annotations

from typing import Final

SPEECH_GAP_MS: Final = 500
"""Shorter silence within a voice's speech is part of the speech: breaths, and late pieces."""
PAUSE_MS: Final = 2_000
"""A user who goes on sooner has paused, and not ended a turn; longer pauses in a turn are rare."""
ANSWER_WAIT_MS: Final = 4_000
"""Silence for so long is no answer: people begin to repeat what they said."""
SHORT_MS: Final = 1_000
"""Shorter speech is a backchannel or a false start: a word or two."""
YIELD_MS: Final = 2_000
"""A model that falls silent within this time has given way to a user who begins to speak."""
NEAR_TIE_LOGITS: Final = 0.5
"""Of two tokens that are nearer, the likelier one has less than 62 % of their probability."""
FDB_USER_GAP_MS: Final = 600
"""Full-Duplex-Bench v1.5 joins the user's speech over gaps up to this."""
FDB_MODEL_GAP_MS: Final = 500
"""Full-Duplex-Bench v1.5 joins the model's speech over gaps up to this."""
FDB_SHORT_MS: Final = 1_000
"""Full-Duplex-Bench v1 takes shorter speech of few words for no turn."""
FDB_WORDS_MAX: Final = 3
"""Full-Duplex-Bench v1 takes short speech of up to so many words for no turn."""
HEARD_MS: Final = 400
"""Speech over the model: shorter speech in a unit may not be noticed in it (`tiny` needs 0.4 s)."""
