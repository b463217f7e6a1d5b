"""Azure Blob Storage and Azure Data Lake Storage, through azure-storage-blob.

This storage uses the Blob service API, which accounts with and without hierarchical namespaces support.
"""
