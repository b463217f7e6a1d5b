"""Example DAGs of the plugin."""
