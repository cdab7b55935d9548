"""Consensus of a cluster: a hardened Raft behind `consensus.Consensus`."""
