"""Checks and measurements around the package; each file is a script of its own."""
