"""Transactions and commits: changes, drafts, groups, conflicts."""
