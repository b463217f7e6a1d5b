"""Which files of a table are worth writing anew, and manifests without the delete files that then have no use."""
