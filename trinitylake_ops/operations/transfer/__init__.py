"""Select the files of a version and copy them to a target."""
