"""Ranks of several hosts: memory within a host, and the network between one rank of each."""
