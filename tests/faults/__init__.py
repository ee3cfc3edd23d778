"""Trainings that are killed, signaled, doubled and starved, and must end as if nothing had happened."""
