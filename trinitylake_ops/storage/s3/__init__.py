"""Amazon S3 and compatible servers, through s3fs or obstore."""
