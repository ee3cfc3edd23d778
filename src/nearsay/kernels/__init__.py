"""Fast paths with the signature of the plain functions they imitate."""
