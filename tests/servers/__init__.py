"""Storage servers on loopback, started once per test run and shared by its workers."""
