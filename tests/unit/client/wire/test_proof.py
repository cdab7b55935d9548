"""The proof that a node belongs to a cluster."""

from raftq.client.wire.proof import check_proof, cluster_proof

SECRET = b"a secret of the tests"


def test_a_proof_holds_for_its_secret_and_cluster_only() -> None:
    proof = cluster_proof(SECRET, "one")
    assert check_proof(proof, SECRET, "one")
    assert not check_proof(proof, SECRET, "two")
    assert not check_proof(proof, b"another secret of them", "one")
    for wrong in (b"", proof[:-1], proof + b"\0", bytes(32)):
        assert not check_proof(wrong, SECRET, "one")


def test_a_proof_does_not_change_between_releases_and_does_not_hold_the_secret() -> None:
    proof = cluster_proof(SECRET, "one")
    assert proof.hex() == "74f55816fc8a3c447d8e492217b52b2d87e91be31834ff00cfe4f3efdc03cbaa"
    assert SECRET not in proof
