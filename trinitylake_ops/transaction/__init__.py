"""Versions, snapshots, transactions and commits over the tree."""
