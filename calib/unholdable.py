"""What a quantizer says of rows that its format cannot hold."""


class UnholdableError(ValueError):
    """A row has weights its codec cannot express; `row` counts from the first that was given, `advice` says why."""

    def __init__(self, row: int, advice: str) -> None:
        super().__init__(f"row {row} has {advice}")
        self.row = row
        self.advice = advice
