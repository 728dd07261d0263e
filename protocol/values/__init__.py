"""What crosses the machine's edge: messages, requests, events, effects, errors and limits."""
