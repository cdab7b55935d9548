"""Compression of a batch's body. (Pure.)

Decompression knows the size to expect, gives exactly that many bytes or a CorruptBatch, and never
allocates more. Compressors are made per call because theirs are not safe to share among threads.
"""

import lz4.block
import zstandard

from raftq.client.common.errors import CorruptBatch, InvalidArgument

CODEC_NONE, CODEC_LZ4, CODEC_ZSTD = 0, 1, 2
CODECS = {"none": CODEC_NONE, "lz4": CODEC_LZ4, "zstd": CODEC_ZSTD}

_ZSTD_WINDOW_MAX = 64 * 1024 * 1024  # a batch's own bound: no honest frame needs more


def compress(codec: int, body: bytes) -> tuple[int, bytes]:
    """(codec, bytes); a body that does not shrink stays plain."""
    if codec == CODEC_LZ4:
        packed = lz4.block.compress(body, store_size=False)
    elif codec == CODEC_ZSTD:
        packed = zstandard.ZstdCompressor(level=3).compress(body)
    else:
        raise InvalidArgument(f"codec {codec} is unknown")
    return (codec, packed) if len(packed) < len(body) else (CODEC_NONE, body)


def decompress(codec: int, packed: bytes | memoryview, size: int) -> bytes:
    try:
        body = _lz4(packed, size) if codec == CODEC_LZ4 else _zstd(packed, size)
    except (lz4.block.LZ4BlockError, zstandard.ZstdError) as error:
        raise CorruptBatch(f"the batch body does not decompress: {error}") from error
    if len(body) != size:
        raise CorruptBatch(f"the batch body decompresses to {len(body)} bytes, {size} expected")
    return body


def _lz4(packed: bytes | memoryview, size: int) -> bytes:
    # lz4 cannot expand by more than 255, so a larger claim is a lie not worth allocating.
    if size > 255 * len(packed) + 64:
        raise CorruptBatch(f"{len(packed)} lz4 bytes cannot become {size}")
    return bytes(lz4.block.decompress(packed, uncompressed_size=size))


def _zstd(packed: bytes | memoryview, size: int) -> bytes:
    claimed = zstandard.get_frame_parameters(packed).content_size
    if claimed != size:
        raise CorruptBatch(f"a zstd frame of {claimed} bytes, {size} expected")
    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_MAX)
    return decompressor.decompress(packed, max_output_size=size, allow_extra_data=False)
