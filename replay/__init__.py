"""How a session is run again: logic replay, full replay, and the explanation of a divergence."""
