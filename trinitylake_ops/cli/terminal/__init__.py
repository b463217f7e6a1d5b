"""How a command words what it says, and how a signal ends it."""
