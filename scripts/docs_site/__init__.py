"""Build the documentation site from the pages of the repository and a reference that is generated from the code."""
