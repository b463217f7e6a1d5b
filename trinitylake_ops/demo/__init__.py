"""The demo: flights of New York, published month by month, and what operators do with them."""
