"""Shell: the blocking admin client's verbs about groups, dead letters and delayed records."""

from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from raftq.client.admin.dead_letters import Moment
from raftq.client.admin.groups import ResetTo
from raftq.client.admin.results import DeadLetter, DelayedRecord, DelayTotals, GroupDescription
from raftq.client.wire.group_messages import GroupSummary

if TYPE_CHECKING:
    from raftq.client.admin.admin import Admin as AsyncAdmin

T = TypeVar("T")


class QueueVerbs:
    """For the blocking Admin, which has the rest."""

    _client: "AsyncAdmin"

    if TYPE_CHECKING:

        def _call(self, work: Coroutine[Any, Any, T]) -> T: ...

    def list_groups(self) -> list[GroupSummary]:
        """The groups that have, or had, members."""
        return self._call(self._client.list_groups())

    def describe_group(self, group: str) -> GroupDescription:
        """Members, and for each partition the position and the lag."""
        return self._call(self._client.describe_group(group))

    def reset_group(
        self,
        group: str,
        topic: str,
        to: ResetTo = "earliest",
        partition: int | None = None,
        force: bool = False,
    ) -> dict[int, int]:
        """Let the group go on elsewhere: at an end, an offset, or a time (a datetime); where, by
        partition. Refused while the group has readers, unless `force`."""
        return self._call(self._client.reset_group(group, topic, to, partition, force))

    def delete_group(self, group: str) -> None:
        """Forget a group, its positions and everything it settled."""
        self._call(self._client.delete_group(group))

    def pause_group(self, group: str, topic: str | None = None) -> None:
        """Lease nothing to this group until `resume_group`, in one topic or all that it has."""
        self._call(self._client.pause_group(group, topic))

    def resume_group(self, group: str, topic: str | None = None) -> None:
        self._call(self._client.resume_group(group, topic))

    def purge_group(self, group: str, topic: str | None = None) -> int:
        """Everything that is there now counts as settled for this group; how many records."""
        return self._call(self._client.purge_group(group, topic))

    def dead_letters(  # noqa: PLR0913 - what they can be found by
        self,
        topic: str,
        limit: int = 100,
        *,
        group: str = "",
        reason: str = "",
        key: bytes | None = None,
        since: Moment | None = None,
        until: Moment | None = None,
        partition: int | None = None,
    ) -> list[DeadLetter]:
        """The dead letters of a topic that are still there, at most `limit`."""
        return self._call(
            self._client.dead_letters(
                topic, limit, group=group, reason=reason, key=key, since=since, until=until,
                partition=partition,
            )
        )  # fmt: skip

    def parked_letters(self, topic: str) -> int:
        """Records of a topic that were given up, but whose dead letters are refused: they are not
        settled, and are tried again now and then."""
        return self._call(self._client.parked_letters(topic))

    def redrive(  # noqa: PLR0913
        self,
        topic: str,
        limit: int | None = None,
        rate: float | None = None,
        *,
        group: str = "",
        reason: str = "",
        key: bytes | None = None,
        since: Moment | None = None,
        until: Moment | None = None,
        partition: int | None = None,
    ) -> int:
        """Send dead letters back to where they came from, at most `rate` a second; how many."""
        return self._call(
            self._client.redrive(
                topic, limit, rate, group=group, reason=reason, key=key, since=since, until=until,
                partition=partition,
            )
        )  # fmt: skip

    def purge(  # noqa: PLR0913
        self,
        topic: str,
        limit: int | None = None,
        *,
        group: str = "",
        reason: str = "",
        key: bytes | None = None,
        since: Moment | None = None,
        until: Moment | None = None,
        partition: int | None = None,
    ) -> int:
        """Forget dead letters for good; how many."""
        return self._call(
            self._client.purge(
                topic, limit, group=group, reason=reason, key=key, since=since, until=until,
                partition=partition,
            )
        )  # fmt: skip

    def delayed(
        self, topic: str, limit: int = 100, partition: int | None = None, values: bool = False
    ) -> list[DelayedRecord]:
        """Records that are not yet due, the next one first; with `values` also what is in them."""
        return self._call(self._client.delayed(topic, limit, partition, values))

    def cancel_delayed(self, topic: str, partition: int, offsets: int | Iterable[int]) -> list[int]:
        """Cancel delayed records by their places: those that will never be seen now."""
        return self._call(self._client.cancel_delayed(topic, partition, offsets))

    def delay_totals(self, topic: str) -> DelayTotals:
        return self._call(self._client.delay_totals(topic))
