"""Create, list, compare, promote, refresh and drop clones of a lakehouse at other roots."""
