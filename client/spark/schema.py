"""Pure: the columns of the data source as Spark types."""

from collections.abc import Sequence

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from raftq.client.common.errors import InvalidArgument
from raftq.client.spark.options import HEADERS

HEADERS_TYPE = ArrayType(
    StructType([StructField("key", StringType()), StructField("value", BinaryType())])
)
TYPES: dict[str, DataType] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "priority": ByteType(),
    HEADERS: HEADERS_TYPE,
}


def read_schema(columns: Sequence[str]) -> StructType:
    return StructType([StructField(name, TYPES[name]) for name in columns])


def fields_of(schema: StructType) -> list[tuple[str, bool]]:
    """Names and nullability of the schema that Spark requests; a user's own schema is checked."""
    wrong = [
        f"{field.name} {field.dataType.simpleString()}"
        for field in schema.fields
        if TYPES.get(field.name) != field.dataType
    ]
    if wrong:
        raise InvalidArgument(
            f"this source has no columns {', '.join(wrong)}; it has "
            + ", ".join(f"{name} {kind.simpleString()}" for name, kind in TYPES.items())
        )
    return [(field.name, field.nullable) for field in schema.fields]
