"""S3, by two clients."""
