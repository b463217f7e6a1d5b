"""The demo: publishes flights from New York month by month, and rehearses incidents."""
