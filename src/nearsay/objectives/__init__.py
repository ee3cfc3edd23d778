"""One file per loss: the formula as a pure function, then the value that calls it."""
