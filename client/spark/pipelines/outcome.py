"""Pure: what a job has done, and where its picture is."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Done:
    """What a job has done."""

    rows: int
    batches: int = 1
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Records a second."""
        return self.rows / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Drawn:
    """A picture, or one sentence that says why there is none."""

    path: str = ""
    why_not: str = ""
