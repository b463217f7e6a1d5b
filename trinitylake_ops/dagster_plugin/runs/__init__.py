"""What runs read and record."""
