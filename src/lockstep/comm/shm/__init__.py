"""Ranks that are processes of one host: memory that they share, and sockets between them."""
