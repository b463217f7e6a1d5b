"""Parts of `benchmarks/same_as_before.py`: the steps, the driver that runs them in a tree, and the comparison."""
