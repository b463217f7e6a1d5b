"""The storage contract: tests that every storage must pass, also storages of other packages."""
