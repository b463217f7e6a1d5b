"""The storage contract: tests that every storage must pass, including storages from other packages."""
