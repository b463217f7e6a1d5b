"""Transfers of the files of a version: selection, names at the target, copies in order, files that the target has."""
