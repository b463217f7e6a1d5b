"""Google Cloud Storage, through gcsfs."""
