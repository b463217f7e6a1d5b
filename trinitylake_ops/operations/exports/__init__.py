"""Create, verify, restore, drop and prune exports."""
