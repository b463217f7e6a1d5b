"""Azure Blob Storage and Azure Data Lake Storage, through azure-storage-blob.

It uses the API of the Blob service, which accounts with and without hierarchical namespaces support.
"""
