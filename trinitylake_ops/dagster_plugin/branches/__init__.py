"""Branch deployments: which branch a process works for, and the clone of production that it gets."""
