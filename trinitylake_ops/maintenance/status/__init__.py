"""The state of a lakehouse on one screen: a bounded number of requests tells it, whatever the lakehouse holds."""
