"""The record of measured numbers, on records of runs that never were."""
