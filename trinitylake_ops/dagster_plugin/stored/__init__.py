"""How assets are stored as tables: what their metadata says, and what they return and ask for."""
