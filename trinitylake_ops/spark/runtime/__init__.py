"""The Spark runtime: Java, Spark Connect, jobs and errors."""
