"""Storage servers on loopback for tests: started once per test run, shared by its workers, gone after it."""
