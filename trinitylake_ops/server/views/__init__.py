"""Requests about views."""
