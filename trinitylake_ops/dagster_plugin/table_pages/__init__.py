"""What the page of a table's asset shows: its versions, partitions and first rows, and links to roll it back."""
