"""The launcher: the command line and, behind it, whatever starts training. Imports no torch."""
