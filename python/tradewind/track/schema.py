"""The tables of metrics.sqlite and the statements over them.

A cell is a REAL or INTEGER for numbers, NULL for NaN (which SQLite cannot hold), TEXT in JSON for
the rest: true, false and objects such as {"text": …}.
"""

from __future__ import annotations

import json
import math
import sqlite3
from typing import Any

VERSION = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS segments (number INTEGER PRIMARY KEY, size INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS attempts (
  attempt INTEGER PRIMARY KEY, first_step INTEGER NOT NULL, cut INTEGER);
CREATE TABLE IF NOT EXISTS names (
  id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, is_scalar INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS points (
  name_id INTEGER NOT NULL, attempt INTEGER NOT NULL, step INTEGER NOT NULL, time REAL NOT NULL,
  value, PRIMARY KEY (name_id, attempt, step)) WITHOUT ROWID;
"""
_TABLE_NAMES = {"segments", "attempts", "names", "points"}
# A point stands if it is of the attempt asked for, or, for the run, before the attempt's cut.
_STANDS = "(points.attempt = :attempt OR (:attempt IS NULL AND (cut IS NULL OR points.step < cut)))"
SCALAR_NAMES = "SELECT name FROM names WHERE is_scalar ORDER BY name"
ATTEMPTS = "SELECT attempt FROM attempts ORDER BY attempt"
FIRST_STEP = "SELECT first_step FROM attempts WHERE attempt = :attempt"
SERIES = f"""
SELECT step, time, CASE value WHEN 'true' THEN 1 WHEN 'false' THEN 0 ELSE value END
FROM points JOIN attempts USING (attempt)
WHERE name_id = (SELECT id FROM names WHERE name = :name) AND {_STANDS}
  AND (typeof(value) <> 'text' OR value IN ('true', 'false')) ORDER BY step, attempt"""
ROWS = f"""
SELECT step, attempt, time, name, value
FROM points JOIN attempts USING (attempt) JOIN names ON names.id = name_id
WHERE {_STANDS} ORDER BY step, attempt, name_id"""


def prepare(connection: sqlite3.Connection) -> None:
    """Make the tables in an empty database. Raises sqlite3.DatabaseError for a foreign one."""
    tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    found = {name for (name,) in tables}
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if found == _TABLE_NAMES and version == VERSION:
        return
    if found or version:
        raise sqlite3.DatabaseError(f"an index of schema {version}, expected {VERSION}")
    connection.executescript(f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version = {VERSION}; COMMIT;")


def known_segments(connection: sqlite3.Connection) -> dict[int, int]:
    """Number and size in bytes of the segments that are in the index."""
    return dict(connection.execute("SELECT number, size FROM segments").fetchall())


def clear(connection: sqlite3.Connection) -> None:
    """Forget everything, inside a transaction."""
    for table in sorted(_TABLE_NAMES):
        connection.execute(f"DELETE FROM {table}")


def insert(
    connection: sqlite3.Connection, number: int, size: int, rows: list[dict[str, Any]]
) -> None:
    """Add the rows of one segment, inside a transaction. Segments come in their order."""
    connection.execute("INSERT INTO segments VALUES (?, ?)", (number, size))
    first_steps: dict[int, int] = {}
    names: dict[str, bool] = {}
    points = []
    for row in rows:
        step, time, attempt = row.pop("step"), row.pop("time"), row.pop("attempt")
        first_steps.setdefault(attempt, step)
        for name, value in row.items():
            names[name] = names.get(name, False) or isinstance(value, (int, float))
            points.append((name, attempt, step, time, to_cell(value)))
    connection.executemany(
        "INSERT OR IGNORE INTO attempts VALUES (?, ?, NULL)", first_steps.items()
    )
    ids = {name: _name_id(connection, name, is_scalar) for name, is_scalar in names.items()}
    connection.executemany(
        "INSERT OR REPLACE INTO points VALUES (?, ?, ?, ?, ?)",
        ((ids[name], *rest) for name, *rest in points),
    )


def update_cuts(connection: sqlite3.Connection) -> None:
    """Set each attempt's cut: the first step that a later attempt logged, inside a transaction."""
    connection.execute(
        "UPDATE attempts SET cut = (SELECT min(later.first_step) FROM attempts AS later "
        "WHERE later.attempt > attempts.attempt)"
    )


def to_cell(value: Any) -> float | int | str | None:
    """A value of a row as SQLite holds it."""
    if type(value) is int:
        return value
    if type(value) is float:
        return None if math.isnan(value) else value
    return json.dumps(value)


def from_cell(value: float | int | str | None) -> Any:
    """The value back from SQLite."""
    if value is None:
        return math.nan
    return json.loads(value) if isinstance(value, str) else value


def _name_id(connection: sqlite3.Connection, name: str, is_scalar: bool) -> int:
    connection.execute(
        "INSERT INTO names (name, is_scalar) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET "
        "is_scalar = max(is_scalar, excluded.is_scalar)",
        (name, is_scalar),
    )
    (name_id,) = connection.execute("SELECT id FROM names WHERE name = ?", (name,)).fetchone()
    return int(name_id)
