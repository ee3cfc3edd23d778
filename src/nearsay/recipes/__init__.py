"""One file per data set, with a function `recipe` that returns an Experiment and whose signature is a command line.

The name of a file is the name of its recipe, except for `methods.py`, the table that all of them share, and for files
that begin with an underscore. Nothing is imported here, so that the names can be listed without torch.
"""
