"""A recorded session in the formats of other tools: sound, captions, video, lines, MCAP."""
