"""Scan planning: which files a scan reads, so that a client needs no Avro. Nothing is kept between requests."""
