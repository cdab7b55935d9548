"""A hardened Raft behind `consensus.Consensus`."""
