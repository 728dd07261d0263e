"""Golden logs: sessions made once and replayed for ever, their scenes, and damage done to them."""
