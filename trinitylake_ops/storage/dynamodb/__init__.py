"""Storage in a table of Amazon DynamoDB or a compatible server, through botocore.

Each file is an item. Its content is stored in the item, or in parts to which the item refers. The table has the
partition key ``root`` and the sort key ``path``, so that the paths of a root are sorted (docs/storages/README.md).
"""
