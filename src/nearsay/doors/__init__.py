"""What commands and Python have in common: one function for each thing that is done with runs."""
