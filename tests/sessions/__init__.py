"""Sessions in memory: played whole or step by step, watched and judged."""
