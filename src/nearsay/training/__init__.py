"""Training: an experiment in, a run folder out."""
