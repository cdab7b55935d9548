"""Proof of belonging to a cluster, as it stands in the Hello of a node. (Pure.)

The proof is derived from the cluster's secret and name, so a node of another cluster is refused
even with the same secret, and the secret itself is never sent. It is the same on every connection:
it keeps strangers out, but who can read the traffic between nodes can repeat it, unless TLS is on.
"""

import hmac

_PURPOSE = b"raftq native protocol: cluster proof 1"


def cluster_proof(secret: bytes, cluster_id: str) -> bytes:
    """What `Hello.cluster_proof` has to be on connections between nodes."""
    return hmac.digest(secret, _PURPOSE + b"\0" + cluster_id.encode(), "sha256")


def check_proof(proof: bytes, secret: bytes, cluster_id: str) -> bool:
    """Whether the proof is right, found out in the same time for every wrong one."""
    return hmac.compare_digest(cluster_proof(secret, cluster_id), proof)
