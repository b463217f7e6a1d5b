"""Azure Blob Storage and Azure Data Lake Storage, by two clients.

Both speak the Blob service's protocol, which accounts with and without hierarchical names understand.
"""
