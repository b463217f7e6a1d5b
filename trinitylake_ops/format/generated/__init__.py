"""Code generated from proto/definitions.proto by `make proto`; not edited by hand."""
