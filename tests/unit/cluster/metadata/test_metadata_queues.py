"""A topic becomes a queue: once, for good, in every copy of the metadata."""

import msgpack
import pytest
from metadatamodel import Model, register

from raftq.client.common.errors import CorruptFile, InvalidArgument, UnknownTopic
from raftq.cluster.metadata.apply import TopicChanged, apply, differences, dump, load
from raftq.cluster.metadata.commands import (
    AddPartitions,
    AlterTopic,
    CreateTopic,
    EnableQueues,
    FenceNode,
)


@pytest.fixture
def model() -> Model:
    model = Model()
    for node_id in (1, 2, 3):
        model.apply(register(node_id))
    model.apply(CreateTopic("t", 2, 3))
    return model


def test_a_topic_becomes_a_queue_once(model: Model) -> None:
    before = load(dump(model.state))
    assert not model.state.topics["t"].queued
    assert apply(model.state, EnableQueues(1), 90) == (None, [TopicChanged("t", 1)])
    assert model.state.topics["t"].queued
    assert differences(before, model.state) == [TopicChanged("t", 1)]
    assert apply(model.state, EnableQueues(1), 91) == (None, [])


def test_it_stays_one_whatever_happens_to_it(model: Model) -> None:
    model.apply(EnableQueues(1))
    for command in (FenceNode(1, 1), AddPartitions("t", 5), AlterTopic("t", {"min_insync": 1})):
        model.apply(command)
        assert model.state.topics["t"].queued
        assert load(dump(model.state)).topics["t"].queued


def test_only_a_topic_of_clients_that_is_there_can_become_one(model: Model) -> None:
    with pytest.raises(UnknownTopic):
        apply(model.state, EnableQueues(7), 90)
    model.apply(CreateTopic("__own", 1))
    with pytest.raises(InvalidArgument, match="cluster's own"):
        apply(model.state, EnableQueues(model.state.topics["__own"].topic_id), 90)


def test_a_dump_whose_mark_is_no_bool_is_not_believed(model: Model) -> None:
    parts = msgpack.unpackb(dump(model.state))
    parts[6][0][5] = 1
    with pytest.raises(CorruptFile, match="Expected `bool`"):
        load(msgpack.packb(parts))
