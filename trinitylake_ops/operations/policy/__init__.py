"""The maintenance policy of a lakehouse: what maintenance may do by itself, when, and what it keeps."""
