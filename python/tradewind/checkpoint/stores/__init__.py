"""Checkpoints on object stores. Nothing here loads torch when imported: the upload process starts
from these modules in a fraction of a second."""
