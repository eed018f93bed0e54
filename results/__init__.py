"""Row schema, Parquet store, aggregation, statistics, tables, plots and the leaderboard."""

from __future__ import annotations
