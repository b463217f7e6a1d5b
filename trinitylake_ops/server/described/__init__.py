"""The operations of the server as data: what may be asked, and which answers there are."""
