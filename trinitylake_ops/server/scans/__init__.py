"""Scan planning, so that clients need not read manifests. No state is kept between requests."""
