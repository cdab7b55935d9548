"""Pure: encodes batches once, with the sequence numbers of their partition.

Every attempt sends the same bytes. New numbers, for a batch that was certainly not written, are put
into a copy: the old bytes may still be on their way.
"""

from crc32c import crc32c

from raftq.client.producer.outbox import Outbox, OutgoingBatch
from raftq.client.wire.encoder import encode
from raftq.client.wire.headers import CRC, CRC_AT, PRODUCER, PRODUCER_AT, REST_AT
from raftq.client.wire.layout import NO_PRODUCER, BatchProducer

SEQUENCES = 1 << 32


def assign(outbox: Outbox, batch: OutgoingBatch, codec: int) -> None:
    """Gives a batch the next numbers of its outbox, and encodes it."""
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
    PRODUCER.pack_into(batch, PRODUCER_AT, producer.id, producer.epoch, producer.base_sequence)
    CRC.pack_into(batch, CRC_AT, crc32c(batch[REST_AT:]))
    return batch
