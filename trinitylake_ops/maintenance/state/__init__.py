"""What operations record in a lakehouse, and the commit that records it."""
