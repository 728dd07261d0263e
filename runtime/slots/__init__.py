"""Slots: the pool, the queue, the workers, and how long a client will wait."""
