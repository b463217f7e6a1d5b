"""Contracts that several implementations inherit."""
