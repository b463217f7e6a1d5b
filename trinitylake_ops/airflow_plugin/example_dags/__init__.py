"""An example of what the plugin offers."""
