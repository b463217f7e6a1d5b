"""Repair: putting right what verify found."""
