"""Exports: create, check, restore and drop them."""
