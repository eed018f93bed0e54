"""The leaderboard: checked entries in, one self-contained page out."""

from __future__ import annotations
