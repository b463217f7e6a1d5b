"""Azure Blob Storage and Azure Data Lake Storage, through azure-storage-blob or obstore.

Both clients use the Blob service's API, which accounts with and without hierarchical namespaces support.
"""
