"""Build the documentation site from pages of the repository and a reference that is generated from the code."""
