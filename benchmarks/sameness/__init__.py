"""What `benchmarks/same_as_before.py` is made of: the steps, who does them in a tree, and the comparison."""
