"""Google Cloud Storage, by gcsfs."""
