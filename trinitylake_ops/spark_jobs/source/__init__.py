"""``format("trinitylake")``: options, opening, writing, streams."""
