"""Contract tests that several implementations inherit."""
