"""The record of measured numbers: which runs are wanted, one small file for each that is done, and the page of both."""
