"""The data source ``format("trinitylake")``: options, reads, writes and streams."""
