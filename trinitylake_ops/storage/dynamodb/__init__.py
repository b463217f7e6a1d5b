"""Storage in a table of Amazon DynamoDB, or of a server that speaks its protocol, through botocore.

A file is an item. Its body stands in the item, or in parts that the item names. The table's keys are ``root`` and
``path``, so one partition key holds the names of one root, sorted (docs/storages/README.md).
"""
