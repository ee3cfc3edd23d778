"""What a verb does beyond one function, one file for each; only files that must import torch."""
