"""What every storage must do, as tests that anybody can run on a storage of theirs."""
