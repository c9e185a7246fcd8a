"""Findings, one line of the report each, and the report as table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.table import Table

Status = Literal["ok", "warning", "missing"]
_SIGNS: dict[Status, str] = {
    "ok": "[green]ok[/]",
    "warning": "[yellow]warning[/]",
    "missing": "[red]missing[/]",
}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `cost` says what a lack costs and `remedy` what to do about it
    (both None where all is well); `facts` are the same for machines, units in the names."""

    title: str
    status: Status
    found: str
    cost: str | None = None
    remedy: str | None = None
    facts: Mapping[str, object] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """The finding as plain JSON."""
        return {
            "title": self.title,
            "status": self.status,
            "found": self.found,
            "cost": self.cost,
            "remedy": self.remedy,
            "facts": dict(self.facts),
        }


@dataclass(frozen=True)
class MachineReport:
    """All findings about a machine, software first."""

    tradewind_version: str
    findings: tuple[Finding, ...]

    def __getitem__(self, title: str) -> Finding:
        """The finding of that title. Raises KeyError for an unknown one."""
        for finding in self.findings:
            if finding.title == title:
                return finding
        raise KeyError(
            f"{title!r}: expected one of {', '.join(each.title for each in self.findings)}"
        )

    def to_json(self) -> dict[str, object]:
        """The report as plain JSON: {"tradewind": version, "findings": [...]}."""
        return {
            "tradewind": self.tradewind_version,
            "findings": [finding.to_json() for finding in self.findings],
        }

    def table(self) -> Table:
        """The report as a table for `rich`."""
        from rich.markup import escape
        from rich.table import Table

        table = Table(
            title=f"tradewind {escape(self.tradewind_version)}: this machine",
            title_justify="left",
            show_lines=True,
        )
        table.add_column("what", style="bold")
        table.add_column("")
        table.add_column("found", overflow="fold", ratio=2)
        table.add_column("what it costs, what to do", overflow="fold", ratio=3)
        for each in self.findings:
            remedy = f"-> {each.remedy}" if each.remedy else None
            advice = "\n".join(escape(text) for text in (each.cost, remedy) if text)
            table.add_row(escape(each.title), _SIGNS[each.status], escape(each.found), advice)
        return table
