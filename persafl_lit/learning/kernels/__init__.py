"""Hand-written derivatives of plain networks."""
