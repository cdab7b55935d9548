"""Batches as they are sent: encoded once, with the sequence numbers of their partition. (Pure.)

Every attempt sends the same bytes. Other numbers, for a batch that was certainly not written, are
put into a copy: the old bytes may still be on their way.
"""

from crc32c import crc32c

from raftq.client.producer.outbox import Outbox, OutgoingBatch
from raftq.client.wire.encoder import encode
from raftq.client.wire.layout import NO_PRODUCER, REST_AT, BatchProducer

SEQUENCES = 1 << 32
_PRODUCER_AT = 40
_CRC_AT = 24


def assign(outbox: Outbox, batch: OutgoingBatch, codec: int) -> None:
    """Give a batch the next numbers of its outbox, and its bytes."""
    producer = NO_PRODUCER
    if outbox.identity is not None:
        producer = BatchProducer(*outbox.identity, outbox.sequence)
    if batch.raw is not None:
        batch.raw = _with_producer(batch.raw, producer)
    else:
        batch.raw = encode(
            batch.values,
            batch.keys,
            batch.headers,
            batch.timestamp if batch.timestamps is None else batch.timestamps,
            batch.expiries,
            deliver_at=batch.deliver_at,
            lane=batch.lane,
            codec=codec,
            producer=producer,
        )
        batch.drop_columns()
    outbox.sequence = (outbox.sequence + batch.count) % SEQUENCES
    batch.number = outbox.encoded
    outbox.encoded += 1


def _with_producer(raw: bytearray, producer: BatchProducer) -> bytearray:
    batch = bytearray(raw)
    batch[_PRODUCER_AT : _PRODUCER_AT + 8] = producer.id.to_bytes(8, "little", signed=True)
    batch[_PRODUCER_AT + 8 : _PRODUCER_AT + 12] = producer.epoch.to_bytes(4, "little")
    batch[_PRODUCER_AT + 12 : _PRODUCER_AT + 16] = producer.base_sequence.to_bytes(4, "little")
    batch[_CRC_AT:REST_AT] = crc32c(batch[REST_AT:]).to_bytes(4, "little")
    return batch
